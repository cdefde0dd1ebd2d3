#include "engine_state.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point at(double seconds) {
  return Clock::time_point(
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace

Engine::State::State(Plan p, std::byte* arena, Communicator& c, EngineOptions o)
    : plan(std::move(p)),
      communicator(c),
      options(std::move(o)),
      step(plan, options.hold_gathers),
      oldest(plan.ops().size()) {
  for (const Op& op : plan.ops()) {
    Request request{op.kind, plan.dtype(op.blocks.front()), ReduceOp::sum, 0, {}, {}};
    for (Block b : op.blocks) {
      request.recv.push_back({arena + plan.byte_offset(b.begin), b.numel()});
    }
    requests.push_back(std::move(request));
  }
  record.step = options.steps_before;
}

void Engine::State::check() const {
  if (!fault.empty()) throw FaultError(fault);
}

void Engine::State::check_index(int tensor) const {
  if (tensor < 0 || tensor >= static_cast<int>(plan.tensors().size())) {
    throw UsageError("tensor index " + std::to_string(tensor) + " is outside the plan's " +
                     std::to_string(plan.tensors().size()) + " tensors");
  }
}

bool Engine::State::launchable() const {
  return fault.empty() && !raw_fault && !(stopping && in_backward) && step.launchable();
}

void Engine::State::queued(std::span<const int> ops, double now) {
  for (int op : ops) record.queued_s[static_cast<size_t>(op)] = now;
}

void Engine::State::set_fault(std::string message) {
  if (!fault.empty()) return;
  fault = message.empty() ? "communication failed" : std::move(message);
  arrived.notify_all();
  work.notify_all();
}

// Hands the current step to the timeline, once.
void Engine::State::post_record() {
  if (!posted && writer && writer->steps().contains(record.step)) outbox.push_back(record);
  posted = true;
}

// Ops may queue inside the backend, so it counts as a stall only if nothing completes.
double Engine::State::waiting_since() const {
  return std::max(record.launched_s[oldest], last_done_s);
}

void Engine::State::complete(int op, const std::exception_ptr& error,
                             const std::shared_ptr<State>& self) {
  const std::string message = error ? what(error) : "";
  std::unique_lock lock(mutex);
  if (error) {
    step.fail(op);
    if (fault.empty() && !raw_fault) {
      raw_fault =
          plan.describe(op) + " of step " + std::to_string(record.step) + " failed: " + message;
    }
    work.notify_one();
    return;
  }
  const double now = now_s();
  record.done_s[static_cast<size_t>(op)] = last_done_s = now;
  if (std::exchange(warned, false)) work.notify_one();  // it sleeps until the limit
  const Step::Change change = step.complete(op);
  queued(change.queued, now);
  while (oldest < step.launched() && record.done_s[oldest] > 0) ++oldest;
  // A waiter that goes on takes the core, or Python's lock, from the thread that keeps the network
  // busy; so that one goes first. It is this one, since another would have to be woken.
  if (!change.arrived.empty() || step.reduced()) to_signal = true;
  if (launchable() && !launching) {
    launch_all(lock, self);
  } else if (to_signal && !launchable()) {
    signal_waiters();
  }
  if (stopping) work.notify_one();
}

void Engine::State::signal_waiters() {
  to_signal = false;
  arrived.notify_all();
}

void Engine::State::launch_all(std::unique_lock<std::mutex>& lock,
                               const std::shared_ptr<State>& self) noexcept {
  launching = true;
  while (launchable()) {
    const int op = step.launch();
    record.launched_s[static_cast<size_t>(op)] = now_s();
    lock.unlock();
    communicator.launch(requests[static_cast<size_t>(op)],
                        [self, op](std::exception_ptr error) { self->complete(op, error, self); });
    lock.lock();
    if (to_signal) signal_waiters();
  }
  launching = false;
  if (to_signal) signal_waiters();  // a fault came between
  if (!watching) work.notify_one();
}

void Engine::State::watch_stall(double now, std::unique_lock<std::mutex>& lock) {
  const double waited = now - waiting_since();
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3g s", waited);
  const std::string text = plan.describe(static_cast<int>(oldest)) + " of step " +
                           std::to_string(record.step) + " has not completed for " + seconds;
  if (waited >= options.stall_limit_s) {
    raw_fault = text + ", the stall limit";
  } else if (waited >= options.stall_warning_s && !warned) {
    warned = true;
    lock.unlock();
    warn(text + "; a rank may be slow, stuck or lost");
    lock.lock();
  }
}

void Engine::State::warn(const std::string& text) const {
  try {
    if (options.on_warning) options.on_warning(text);
  } catch (const std::exception&) {
    // A log that cannot be written must not end the training.
  }
}

void Engine::State::report_fault(std::unique_lock<std::mutex>& lock) {
  const std::string raw = *raw_fault;
  lock.unlock();
  std::string message = raw;
  try {
    if (options.on_fault) message = options.on_fault(raw);
    if (message.empty()) message = raw;
  } catch (const std::exception& e) {
    message += std::string("; the cause could not be found out: ") + e.what();
  }
  lock.lock();
  raw_fault.reset();
  set_fault(message);
  post_record();
}

void Engine::State::write_outbox(std::unique_lock<std::mutex>& lock) {
  std::vector<StepRecord> records = std::exchange(outbox, {});
  std::shared_ptr<TimelineWriter> target = writer;
  writing = true;
  lock.unlock();
  std::string problem;
  try {
    for (const StepRecord& r : records) {
      if (target) target->write(events(r, plan));
    }
  } catch (const Error& e) {
    problem = e.what();
  }
  if (!problem.empty()) warn("timeline stopped: " + problem);
  lock.lock();
  if (!problem.empty() && writer == target) writer.reset();
  writing = false;
  arrived.notify_all();
}

void Engine::State::run(const std::shared_ptr<State>& self) {
  std::unique_lock lock(mutex);
  running = true;
  arrived.notify_all();
  for (;;) {
    const bool in_flight = step.in_flight() > 0;
    if (raw_fault && fault.empty()) {
      report_fault(lock);
    } else if (launchable() && !launching) {
      launch_all(lock, self);
    } else if (!outbox.empty()) {
      write_outbox(lock);
    } else if (stopping && !launching && (!in_flight || !fault.empty())) {
      if (posted) return;
      post_record();
    } else if (in_flight && fault.empty() && oldest < step.launched()) {
      const double bound =
          warned ? options.stall_limit_s : std::min(options.stall_warning_s, options.stall_limit_s);
      const double deadline = waiting_since() + bound;
      if (const double now = now_s(); now >= deadline) {
        watch_stall(now, lock);
      } else {
        watching = true;
        work.wait_until(lock, at(deadline));
        watching = false;
      }
    } else {
      work.wait(lock);
    }
  }
}

}  // namespace usbyte
