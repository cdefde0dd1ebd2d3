// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <set>

#include "cuda/cuda.h"
#include "nccl_comms.h"

namespace usbyte {

/// Memory that NCCL can work on in place, and what its communicators know of it. Not thread-safe;
/// the owner guards it.
class NcclBuffers {
 public:
  /// `comms` outlives it.
  NcclBuffers(std::shared_ptr<NcclApi> nccl, std::shared_ptr<Cuda> cuda, NcclComms& comms,
              const NcclOptions& options);

  // As NcclCommunicator's.
  void* allocate(size_t bytes);
  void free(void* memory);
  void enroll(void* memory, size_t bytes);
  void remove(void* memory);
  /// Removes all.
  void clear();

 private:
  /// A buffer as one communicator knows it.
  struct Registration {
    void* memory;
    size_t slot;
    void* handle = nullptr;
    NcclWindow* window = nullptr;
  };

  void enroll(void* memory, size_t bytes, size_t slot);
  void deregister(const Registration& registration);

  const std::shared_ptr<NcclApi> nccl_;
  const std::shared_ptr<Cuda> cuda_;
  NcclComms& comms_;
  const NcclOptions options_;
  std::set<void*> allocated_;               // by ncclMemAlloc
  std::deque<Registration> registrations_;  // NCCL writes to one until its call is over
};

}  // namespace usbyte
