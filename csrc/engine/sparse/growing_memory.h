// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/cuda.h"

namespace usbyte {

/// A device's memory, or page-locked memory of the host, that grows. What it had before goes with
/// this object, as to free it waits for all that runs on the device; since it at least doubles,
/// that is less than what it has.
///
/// To grow may wait likewise, also for a collective that waits for other ranks. These must come to
/// launch it without what this one does afterwards; ops whose window lets the collective run beside
/// them do not keep them from it.
class GrowingMemory {
 public:
  enum class Kind { device, pinned };

  GrowingMemory(std::shared_ptr<Cuda> cuda, Kind kind) : cuda_(std::move(cuda)), kind_(kind) {}
  ~GrowingMemory() {
    for (void* memory : all_)
      kind_ == Kind::device ? cuda_->free(memory) : cuda_->free_pinned(memory);
  }
  GrowingMemory(const GrowingMemory&) = delete;
  GrowingMemory& operator=(const GrowingMemory&) = delete;

  /// Room for so many, of any content; the same place while that suffices.
  template <typename T>
  T* of(int64_t count) {
    const auto wanted = std::bit_ceil(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T));
    if (wanted > size_) {
      all_.reserve(all_.size() + 1);
      all_.push_back(kind_ == Kind::device ? cuda_->allocate(wanted)
                                           : cuda_->allocate_pinned(wanted));
      size_ = wanted;
    }
    return static_cast<T*>(all_.back());
  }

 private:
  const std::shared_ptr<Cuda> cuda_;
  const Kind kind_;
  size_t size_ = 0;
  std::vector<void*> all_;
};

}  // namespace usbyte
