// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace usbyte {

/// One variable, for documentation and `usbyte doctor`.
struct EnvVariable {
  std::string name;
  std::string value;  ///< in force, as text
  std::string unit;   ///< "s", "bytes" or ""
  std::string description;
  bool set;  ///< from the environment rather than the default
};

/// Every USBYTE_* variable, read once. Nothing else in the library calls getenv.
/// Arguments given in code win over the environment.
struct Env {
  /// Throws EnvError, which names variable, value and what is accepted. Unknown USBYTE_* names are
  /// an error too, since a misspelt knob would otherwise silently do nothing.
  static Env read();

  std::string backend;         ///< USBYTE_BACKEND
  std::string policy;          ///< USBYTE_POLICY, "" = auto
  std::string topology;        ///< USBYTE_TOPOLOGY, "" = none
  int64_t partition_bytes;     ///< USBYTE_PARTITION_BYTES
  int64_t credit_bytes;        ///< USBYTE_CREDIT_BYTES
  int64_t bucket_bytes;        ///< USBYTE_BUCKET_BYTES
  int64_t one_shot_bytes;      ///< USBYTE_ONE_SHOT_BYTES
  int64_t learning_steps;      ///< USBYTE_LEARNING_STEPS
  double stall_warning_s;      ///< USBYTE_STALL_WARNING_S
  double stall_limit_s;        ///< USBYTE_STALL_LIMIT_S
  double start_limit_s;        ///< USBYTE_START_LIMIT_S
  int64_t check_steps;         ///< USBYTE_CHECK_STEPS, 0 = never
  std::string timeline;        ///< USBYTE_TIMELINE
  std::string timeline_steps;  ///< USBYTE_TIMELINE_STEPS
  std::string report;          ///< USBYTE_REPORT
  std::string flight;          ///< USBYTE_FLIGHT
  std::string job_token;       ///< USBYTE_JOB_TOKEN, a secret
  std::string log_level;       ///< USBYTE_LOG_LEVEL
  int64_t chunk_bytes;         ///< USBYTE_CHUNK_BYTES
  std::string nccl_library;    ///< USBYTE_NCCL_LIB
  int64_t nccl_communicators;  ///< USBYTE_NCCL_COMMUNICATORS
  int64_t nccl_max_ctas;       ///< USBYTE_NCCL_MAX_CTAS, 0 = NCCL's choice
  int64_t nccl_register;       ///< USBYTE_NCCL_REGISTER, 0 or 1

  std::vector<EnvVariable> variables;
};

}  // namespace usbyte
