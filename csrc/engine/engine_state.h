#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/coding/coding.h"
#include "engine/device/device_watch.h"
#include "engine/sparse/sparse_ops.h"
#include "flight.h"
#include "usbyte/engine.h"
#include "usbyte/step.h"
#include "usbyte/step_record.h"

namespace usbyte {

/// What the engine's methods, its thread and the communicator's completions share.
///
/// Ownership: the caller's threads and communicator threads change the fields below only with
/// `mutex` held, and never call out (communicator, callbacks, files) while holding it; nor what of
/// `device` gives a stream something to do, which may block. Only the engine's thread writes the
/// timeline and calls back. Ops are launched by it and by completions, by one at a time: whoever
/// has set `launching` launches all that can be, also what others make launchable meanwhile.
/// Completions hold the State alive, so one that comes after the Engine's end is harmless.
struct Engine::State {
  State(Plan p, std::byte* a, Communicator& c, EngineOptions o);

  // Constant after construction.
  const Plan plan;
  std::byte* const arena;
  Communicator& communicator;
  EngineOptions options;
  std::vector<Request> requests;             // by op
  const std::unique_ptr<DeviceStep> device;  // null on the host; has a lock of its own

  mutable std::mutex mutex;
  std::condition_variable work;     // signals the engine's thread
  std::condition_variable arrived;  // signals waiters
  bool to_signal = false;           // waiters, once an op has been launched
  bool launching = false;           // a thread is in launch_all, which alone sets and resets this
  bool watching = false;            // the engine's thread sleeps no longer than until a stall
  bool running = false;
  bool stopping = false;
  bool ended = false;                    // what is not this State's own may be gone
  int failers = 0;                       // threads in end_with, for which the end waits
  std::string fault;                     // not empty: final
  std::optional<std::string> raw_fault;  // found here, not yet told to on_fault

  bool in_backward = false;
  bool released = true;  // the all_gathers of this step, if they are held
  int ready_count = 0;
  Step step;
  size_t oldest;           // first op not completed
  double last_done_s = 0;  // when an op last completed
  bool warned = false;     // about what has been in flight since
  StepRecord record;
  FlightRecorder flights;
  bool posted = true;  // `record` is in the outbox, or was not wanted
  bool aborted = false;
  bool looked = false;    // at the device for the last time: from then on, ops may end by an abort
  int64_t open_step = 0;  // of the oldest op that the device was not seen to be through with; or 0

  std::shared_ptr<TimelineWriter> writer;
  std::vector<StepRecord> outbox;     // finished records, for the engine's thread to write
  std::deque<DeviceRecord> unpassed;  // of a device, which become such records
  bool writing = false;               // what was in one of the two

  // The engine's thread's own.
  DeviceWatch watch;
  double polled_s = 0;

  std::vector<LaunchedOp> launched;  // on a device's streams, for `watch`

  std::thread thread;

  int coding_jobs = 0;                // not reported yet
  std::vector<Turn> turns;            // by op, of those that are coded
  std::unique_ptr<Coding> coding;     // null without codecs; goes first, as it reports to this
  std::unique_ptr<SparseOps> sparse;  // null unless rows are added up; likewise

  // With `mutex` held.
  void check() const;
  /// Throws UsageError unless there is such a tensor, and it is sparse or not as asked for.
  void check_tensor(int tensor, bool sparse) const;
  void check_index(int tensor) const;
  bool launchable() const;
  void queued(std::span<const int> ops, double now);
  /// The gradient of `tensor` comes, and has come; throws UsageError if it must not.
  void begin_ready(int tensor, bool sparse);
  void end_ready(int tensor);
  /// Calls `device`, without the lock, as that may block; what fails there ends the engine.
  template <typename Call>
  void on_device(std::unique_lock<std::mutex>& lock, Call call);
  void set_fault(std::string message);
  void post_record();
  /// Without it: writes a gradient of the host to the arena, scaled.
  void take(int tensor, const void* gradient) const;
  /// Without it: the device's times of the current step, for which the host waits.
  StepRecord device_times() const;
  /// Waits for `done`, polling; throws on a fault.
  template <typename Done>
  void block(std::unique_lock<std::mutex>& lock, const std::function<void()>& poll, Done done);

  /// Without it: ends what is in flight, for good.
  void abort();
  /// Likewise, with a fault that others have found.
  void end_with(const std::string& message);
  /// The engine's thread.
  void run(const std::shared_ptr<State>& self);

 private:
  double waiting_since() const;
  void launch_all(std::unique_lock<std::mutex>& lock, const std::shared_ptr<State>& self) noexcept;
  void complete(int op, const std::exception_ptr& error, const std::shared_ptr<State>& self);
  void arrive(int op);
  void finish(int op);
  void watch_device(int op);
  void coded(int op, const std::exception_ptr& error, bool decoded);
  void summed(int op, const SparseTraffic& traffic, const std::exception_ptr& error);
  void fail(int op, const std::string& why);
  std::string failed(int op, int64_t in_step, const std::string& why) const;
  void signal_waiters();
  void launch(int op, const std::shared_ptr<State>& self) noexcept;
  void judge_stall(int op, int64_t in_step, double waited, std::unique_lock<std::mutex>& lock);
  void sleep(std::unique_lock<std::mutex>& lock);
  double poll_interval_s() const { return stopping ? 0.001 : 0.1; }
  bool device_busy() const;
  void poll_device(std::unique_lock<std::mutex>& lock);
  void end_device(std::unique_lock<std::mutex>& lock);
  void report_fault(std::unique_lock<std::mutex>& lock);
  void write_outbox(std::unique_lock<std::mutex>& lock);
  void warn_of_stall(std::string text) const;
  void warn(const std::string& text) const;
};

template <typename Call>
void Engine::State::on_device(std::unique_lock<std::mutex>& lock, Call call) {
  lock.unlock();
  try {
    call();
  } catch (const std::exception& error) {
    lock.lock();
    if (fault.empty() && !raw_fault) raw_fault = error.what();
    work.notify_one();
    throw;
  }
  lock.lock();
}

template <typename Done>
void Engine::State::block(std::unique_lock<std::mutex>& lock, const std::function<void()>& poll,
                          Done done) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPollInterval = std::chrono::milliseconds(100);
  // Arrivals of other tensors wake the waiter too, and must not keep it from polling.
  auto next_poll = Clock::now() + kPollInterval;
  while (!done()) {
    check();
    if (arrived.wait_until(lock, next_poll) == std::cv_status::timeout) {
      next_poll = Clock::now() + kPollInterval;
      if (!poll) continue;
      lock.unlock();
      poll();
      lock.lock();
    }
  }
  check();
}

}  // namespace usbyte
