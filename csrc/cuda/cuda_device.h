// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace usbyte {

struct CudaDevice {
  std::string name;
  std::string compute_capability;  ///< "9.0"
  int64_t memory_bytes;            ///< in all, not what is free
};

/// What this build and this machine offer of CUDA.
struct CudaInfo {
  bool built;                   ///< the extension has a CUDA part
  std::string runtime_version;  ///< of the CUDA runtime linked in, "13.0"; "" when not built
  std::string driver_version;   ///< newest CUDA the driver supports, "13.0"; "" without a driver
  std::vector<CudaDevice> devices;  ///< in CUDA's order, as CUDA_VISIBLE_DEVICES leaves them
  std::string reason;               ///< why `devices` is empty, with a remedy; "" otherwise
};

/// Looks without throwing, so that a machine without a driver is an answer and not a failure.
/// Starts the driver but creates no context on any device; as with every CUDA call, a process
/// forked afterwards cannot use CUDA.
CudaInfo cuda_info();

}  // namespace usbyte
