// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "cuda/cuda.h"
#include "support/thread_annotations.h"
#include "usbyte/error.h"

namespace usbyte {

/// Cancels waits for a device, for good. Thread-safe.
///
/// CUDA's own wait for an event cannot be cancelled, and a hung device hangs for ever; so `await`
/// polls the event.
class CancellationToken {
 public:
  void cancel() {
    MutexLock lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }

  /// Blocks until the event has passed. Throws FaultError once cancelled, even if the event has
  /// passed: after a failure that says nothing about the result.
  void await(Cuda& cuda, CudaEvent event) {
    constexpr auto kInterval = std::chrono::microseconds(100);
    bool over = cuda.passed(event);
    MutexLock lock(mutex_);
    while (!over && !cancelled_) {
      changed_.wait_for(mutex_, kInterval);
      MutexUnlock unlocked(mutex_);
      over = cuda.passed(event);
    }
    if (cancelled_) throw FaultError("communication has ended");
  }

 private:
  Mutex mutex_;
  ConditionVariable changed_;
  bool cancelled_ USBYTE_GUARDED_BY(mutex_) = false;
};

}  // namespace usbyte
