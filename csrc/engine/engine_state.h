// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "coding/codec_worker.h"
#include "device/device_poller.h"
#include "fault_latch.h"
#include "launch_queue.h"
#include "sparse/sparse_ops.h"
#include "support/thread_annotations.h"
#include "timeline_outbox.h"
#include "usbyte/engine.h"

namespace usbyte {

/// What the engine's methods, its thread and the communicator's completions share.
///
/// Locks: `mutex` guards the parts that say so. Nothing calls out (communicator, callbacks, files)
/// while it is held; nor what of `device` gives a stream something to do, which may block. Only the
/// engine's thread writes the timeline and calls back. Ops are launched by it and by completions,
/// one at a time; see `LaunchQueue`. Completions hold the State alive, so that one that comes after
/// the Engine's end is harmless.
struct Engine::State {
  State(Plan p, std::byte* a, Communicator& c, EngineOptions o);

  // Constant after construction.
  const Plan plan;
  std::byte* const flat_buffer;
  Communicator& communicator;
  EngineOptions options;  // until the end, which drops the callbacks
  const std::shared_ptr<const PlanIndex> index;
  const std::unique_ptr<DeviceStep> device;  // null on the host; has a lock of its own

  mutable Mutex mutex;
  ConditionVariable work;     // wakes the engine's thread
  ConditionVariable changed;  // wakes waiters
  LaunchQueue launches USBYTE_GUARDED_BY(mutex);
  FaultLatch faults USBYTE_GUARDED_BY(mutex);
  TimelineOutbox outbox USBYTE_GUARDED_BY(mutex);
  DeviceOps device_ops USBYTE_GUARDED_BY(mutex);
  bool running USBYTE_GUARDED_BY(mutex) = false;
  bool stopping USBYTE_GUARDED_BY(mutex) = false;

 private:
  ThreadRole engine_thread;  // the thread in `run`
  ThreadRole launcher;       // the thread that has called `begin_launching`
  DevicePoller poller USBYTE_GUARDED_BY(engine_thread);
  std::vector<Request> requests USBYTE_GUARDED_BY(launcher);  // by op
  bool timed_sleep USBYTE_GUARDED_BY(mutex) = false;  // the engine's thread will wake by itself
  int coding_jobs USBYTE_GUARDED_BY(mutex) = 0;       // not reported yet
  std::vector<CodingContext> contexts USBYTE_GUARDED_BY(mutex);  // by op, of those that are coded

 public:
  std::thread thread;

  std::unique_ptr<CodecWorker> coding;  // null without codecs; goes first, as it reports to this
  std::unique_ptr<SparseOps> sparse;    // null unless rows are added up; likewise

  /// Throws UsageError unless there is such a tensor, and it is sparse or not as asked for.
  void check_tensor(int tensor, bool sparse) const;
  void check_index(int tensor) const;
  bool launchable() const USBYTE_REQUIRES(mutex);
  void queued(std::span<const int> ops, double now) USBYTE_REQUIRES(mutex);
  /// The gradient of `tensor` comes, and has come; throws UsageError if it must not.
  void begin_ready(int tensor, bool sparse) USBYTE_REQUIRES(mutex);
  void end_ready(int tensor) USBYTE_REQUIRES(mutex);
  /// Calls `device`, without the lock, as that may block; what fails there ends the engine.
  template <typename Call>
  void on_device(Call call) USBYTE_REQUIRES(mutex);
  void set_fault(std::string message) USBYTE_REQUIRES(mutex);
  void post_record() USBYTE_REQUIRES(mutex);
  /// Writes a gradient of the host to the flat buffer, scaled.
  void copy_scaled_gradient(int tensor, const void* gradient) const;
  /// The device's times of the current step, for which the host waits.
  StepRecord device_times() const;
  /// Waits for `done`, which is called with the lock held, and polls meanwhile; throws on a fault.
  template <typename Done>
  void block(const std::function<void()>& poll, Done done) USBYTE_REQUIRES(mutex);
  /// Blocks unless `done` already; on the host the timeline gets it as a wait for `tensor`.
  template <typename Done>
  void block_and_record(int tensor, const std::function<void()>& poll, Done done)
      USBYTE_REQUIRES(mutex);

  /// Ends what is in flight, for good.
  void abort() USBYTE_EXCLUDES(mutex);
  /// The same, with a fault that others have found.
  void fail_externally(const std::string& message) USBYTE_EXCLUDES(mutex);
  /// The engine's thread.
  void run(const std::shared_ptr<State>& self) USBYTE_EXCLUDES(mutex);

 private:
  void launch_all(const std::shared_ptr<State>& self) noexcept USBYTE_REQUIRES(mutex);
  void launch(int op, const std::shared_ptr<State>& self) noexcept USBYTE_REQUIRES(launcher);
  void complete(int op, const std::exception_ptr& error, const std::shared_ptr<State>& self)
      USBYTE_EXCLUDES(mutex);
  void arrive(int op) USBYTE_REQUIRES(mutex);
  void finish(int op) USBYTE_REQUIRES(mutex);
  void watch_device(int op) USBYTE_REQUIRES(mutex);
  void coded(int op, const std::exception_ptr& error, bool decoded) USBYTE_EXCLUDES(mutex);
  void summed(int op, const SparseTraffic& traffic, const std::exception_ptr& error)
      USBYTE_EXCLUDES(mutex);
  void fail(int op, const std::string& why) USBYTE_REQUIRES(mutex);
  std::string failed(int op, int64_t in_step, const std::string& why) const;
  void signal_waiters() USBYTE_REQUIRES(mutex);
  void check_stall(int op, int64_t in_step, double waited) USBYTE_REQUIRES(mutex);
  void sleep() USBYTE_REQUIRES(mutex, engine_thread);
  double poll_interval_s() const USBYTE_REQUIRES(mutex) { return stopping ? 0.001 : 0.1; }
  bool device_busy() const USBYTE_REQUIRES(mutex, engine_thread);
  void poll_device() USBYTE_REQUIRES(mutex, engine_thread);
  void end_device() USBYTE_REQUIRES(mutex);
  void report_fault() USBYTE_REQUIRES(mutex);
  void write_outbox() USBYTE_REQUIRES(mutex);
  void warn_of_stall(std::string text) const;
  void warn(const std::string& text) const;
};

template <typename Call>
void Engine::State::on_device(Call call) {
  try {
    MutexUnlock unlocked(mutex);
    call();
  } catch (const std::exception& error) {
    faults.find(error.what());
    work.notify_one();
    throw;
  }
}

template <typename Done>
void Engine::State::block(const std::function<void()>& poll, Done done) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPollInterval = std::chrono::milliseconds(100);
  // Arrivals of other tensors wake the waiter too, and must not keep it from polling.
  auto next_poll = Clock::now() + kPollInterval;
  while (!done()) {
    faults.check();
    if (changed.wait_until(mutex, next_poll) == std::cv_status::timeout) {
      next_poll = Clock::now() + kPollInterval;
      if (!poll) continue;
      MutexUnlock unlocked(mutex);
      poll();
    }
  }
  faults.check();
}

template <typename Done>
void Engine::State::block_and_record(int tensor, const std::function<void()>& poll, Done done) {
  if (done()) return;
  const double start = now_s();
  block(poll, done);
  if (outbox.records() && !device) launches.add_wait(tensor, start, now_s());
}

}  // namespace usbyte
