// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/cuda.h"

namespace usbyte {

/// An event of a pool; the last copy gives it back. Work that is still ahead of its record does not
/// matter to whoever gets it next, as CUDA's waits refer to the record before them.
class PooledEvent {
 public:
  PooledEvent() = default;
  explicit PooledEvent(std::shared_ptr<const CudaEvent> event) : event_(std::move(event)) {}

  CudaEvent get() const { return *event_; }
  explicit operator bool() const { return event_ != nullptr; }

 private:
  std::shared_ptr<const CudaEvent> event_;
};

/// Whether the event passes within so many seconds. CUDA's own wait for it cannot be given up, so
/// it is looked at now and then.
bool passes_within(Cuda& cuda, CudaEvent event, double seconds);

/// Events that are made once and used again and again, as making one costs more than recording it.
/// Thread-safe. Events may outlive the pool object.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<Cuda> cuda);

  PooledEvent acquire(EventKind kind);

 private:
  // Shared with the events, which come back to it, and destroyed with the last of them.
  struct Free {
    explicit Free(std::shared_ptr<Cuda> c) : cuda(std::move(c)) {}
    ~Free();

    const std::shared_ptr<Cuda> cuda;
    std::mutex mutex;                  // guards the lists
    std::vector<CudaEvent> events[3];  // by kind
  };
  std::shared_ptr<Free> free_;
};

}  // namespace usbyte
