// SPDX-License-Identifier: Apache-2.0
#include "event_waiter.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {

EventWaiter::EventWaiter(std::shared_ptr<Cuda> cuda, std::function<std::string()> failure,
                         std::function<void()> on_failure)
    : cuda_(std::move(cuda)),
      events_(cuda_),
      failure_(std::move(failure)),
      on_failure_(std::move(on_failure)),
      thread_([this] { run(); }) {}

EventWaiter::~EventWaiter() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

void EventWaiter::add(CudaStream stream, Completion done) {
  const PooledEvent event = events_.acquire(EventKind::ordering);
  cuda_->record(event.get(), stream);
  std::lock_guard lock(mutex_);
  watched_.push_back({event, std::move(done)});
  changed_.notify_one();
}

void EventWaiter::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !watched_.empty(); });
    if (watched_.empty()) return;
    Watched next = std::move(watched_.front());
    watched_.pop_front();
    lock.unlock();
    std::exception_ptr error = await(next.event.get());
    std::exchange(next.done, nullptr)(std::move(error));
    lock.lock();
  }
}

std::exception_ptr EventWaiter::await(CudaEvent event) {
  constexpr double kAskEvery_s = 0.1;
  std::chrono::duration<double> pause(10e-6);
  double asked_s = now_s();
  try {
    while (!cuda_->passed(event)) {
      if (now_s() - asked_s >= kAskEvery_s) {
        asked_s = now_s();
        if (!failure_().empty()) break;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 1.25, std::chrono::duration<double>(1e-3));
    }
    // What has passed after a failure holds no result.
    const std::string failure = failure_();
    if (failure.empty()) return nullptr;
    on_failure_();
    throw FaultError(failure);
  } catch (const Error&) {
    return std::current_exception();
  }
}

}  // namespace usbyte
