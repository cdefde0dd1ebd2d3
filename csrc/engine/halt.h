#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "usbyte/cuda.h"
#include "usbyte/error.h"

namespace usbyte {

/// Ends waits for a device, for good. Thread-safe.
///
/// CUDA's own wait for an event cannot be ended, and what hangs on a device hangs for ever; so the
/// event is looked at now and then.
class Halt {
 public:
  void set() {
    std::lock_guard lock(mutex_);
    halted_ = true;
    changed_.notify_all();
  }

  /// Until the event has passed. Throws FaultError once this is set, also if it has passed: what
  /// passes after a failure holds no result.
  void await(Cuda& cuda, CudaEvent event) {
    constexpr auto kInterval = std::chrono::microseconds(100);
    bool over = cuda.passed(event);
    std::unique_lock lock(mutex_);
    while (!over && !halted_) {
      changed_.wait_for(lock, kInterval);
      lock.unlock();
      over = cuda.passed(event);
      lock.lock();
    }
    if (halted_) throw FaultError("communication has ended");
  }

 private:
  std::mutex mutex_;  // guards halted_
  std::condition_variable changed_;
  bool halted_ = false;
};

}  // namespace usbyte
