// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/cuda.h"
#include "event_pool.h"
#include "usbyte/communicator.h"

namespace usbyte {

/// Completes requests once their events have passed, in the order in which they come, on a thread
/// of its own. It asks for each event with growing pauses, up to a millisecond, because a host that
/// blocks on an event could not be told of a fault.
class EventWaiter {
 public:
  /// `failure` is asked about ten times a second while an event is awaited, and once more when it
  /// has passed. If it is not empty, `on_failure` is called and the request completes with a
  /// FaultError of it.
  EventWaiter(std::shared_ptr<Cuda> cuda, std::function<std::string()> failure,
              std::function<void()> on_failure);
  /// Completes what there is; what has not passed after a failure, at once.
  ~EventWaiter();
  EventWaiter(const EventWaiter&) = delete;
  EventWaiter& operator=(const EventWaiter&) = delete;

  /// Records an event on `stream`; `done` is called once it has passed. Throws FaultError.
  void add(CudaStream stream, Completion done);

 private:
  struct Watched {
    PooledEvent event;
    Completion done;
  };

  void run();
  std::exception_ptr await(CudaEvent event);

  const std::shared_ptr<Cuda> cuda_;
  EventPool events_;
  const std::function<std::string()> failure_;
  const std::function<void()> on_failure_;
  std::mutex mutex_;  // guards the three below
  std::condition_variable changed_;
  std::deque<Watched> watched_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace usbyte
