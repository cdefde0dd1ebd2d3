#pragma once

#include <chrono>

#include "support/thread_annotations.h"
#include "usbyte/cuda.h"
#include "usbyte/error.h"

namespace usbyte {

/// Ends waits for a device, for good. Thread-safe.
///
/// CUDA's own wait for an event cannot be ended, and what hangs on a device hangs for ever; so the
/// event is looked at now and then.
class CancellationToken {
 public:
  void cancel() {
    MutexLock lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }

  /// Until the event has passed. Throws FaultError once this is set, also if it has passed: what
  /// passes after a failure holds no result.
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
