#include "engine_state.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "plan/lines.h"
#include "scaled_copy.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using Clock = std::chrono::steady_clock;

// Not later than in an hour, since a clock cannot tell how late "never" may be.
Clock::time_point at(double seconds) {
  seconds = std::min(seconds, now_s() + 3600);
  return Clock::time_point(
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

void check_lines(const Plan& plan, const Communicator& communicator) {
  const auto along = std::ranges::find_if(plan.ops(), [](const Op& op) { return op.line >= 0; });
  if (along == plan.ops().end()) return;
  const auto what = [&] { return plan.describe(static_cast<int>(along - plan.ops().begin())); };
  if (!communicator.topology()) {
    throw UsageError(what() + ": the communicator has no such dimension");
  }
  usbyte::check_lines(plan, *communicator.topology());
}

}  // namespace

Engine::State::State(Plan p, std::byte* a, Communicator& c, EngineOptions o)
    : plan(std::move(p)),
      arena(a),
      communicator(c),
      options(std::move(o)),
      device(options.device ? std::make_unique<DeviceStep>(plan, arena, options.device,
                                                           options.scale, options.hold_gathers)
                            : nullptr),
      step(plan, options.hold_gathers),
      oldest(plan.ops().size()) {
  check_lines(plan, communicator);
  for (const Op& op : plan.ops()) {
    Request request;
    request.kind = op.kind;
    request.dtype = plan.dtype(op);
    request.window_bytes = op.window_bytes;
    request.fence = op.fence;
    if (op.route) request.schedule = std::make_shared<const MeshSchedule>(*op.route);
    request.line = op.line;
    for (Block b : worked_on(op, communicator.topology(), communicator.rank())) {
      request.recv.push_back({arena + plan.byte_offset(b.begin), b.numel()});
    }
    requests.push_back(std::move(request));
  }
  record.step = options.steps_before;
  const auto any = [this](auto is) { return std::ranges::any_of(plan.ops(), is); };
  if (any([](const Op& op) { return op.codec != "none"; })) {
    turns.resize(plan.ops().size());
    const CodingSpace space{
        plan,         arena,          options.memory, communicator.rank(),    communicator.size(),
        options.seed, options.device, nullptr,        communicator.topology()};
    coding = std::make_unique<Coding>(
        space, communicator.stream_ordered(),
        [this](int op, const std::exception_ptr& error) { coded(op, error, false); },
        [this](int op, const std::exception_ptr& error) { coded(op, error, true); });
  }
  if (any([](const Op& op) { return !op.adds_by().empty(); })) {
    sparse = std::make_unique<SparseOps>(
        plan, coding.get(), options.exchange,
        any([](const Op& op) { return op.sparse.has_value(); }) ? options.device : nullptr,
        SparseOptions{options.scale, options.seed},
        [this](int op, const SparseTraffic& traffic, const std::exception_ptr& error) {
          summed(op, traffic, error);
        });
  }
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

void Engine::State::check_tensor(int tensor, bool is_sparse) const {
  check_index(tensor);
  const TensorSpec& spec = plan.tensors()[static_cast<size_t>(tensor)];
  if (spec.sparse() == is_sparse) return;
  throw UsageError("the gradient of '" + spec.name + "' is " +
                   (is_sparse ? "not sparse: call ready" : "sparse: call ready_rows"));
}

bool Engine::State::launchable() const {
  return fault.empty() && !raw_fault && !(stopping && in_backward) && step.launchable();
}

void Engine::State::queued(std::span<const int> ops, double now) {
  for (int op : ops) {
    record.queued_s[static_cast<size_t>(op)] = now;
    if (!step.coded(op)) continue;
    Turn& turn = turns[static_cast<size_t>(op)] = {record.step};
    if (device) {
      try {
        turn.order = device->order(op);
      } catch (const Error& e) {
        return fail(op, e.what());
      }
      turn.done = device->done(op);
    }
    ++coding_jobs;
    coding->encode(op, turn);
  }
}

void Engine::State::begin_ready(int tensor, bool is_sparse) {
  check();
  check_tensor(tensor, is_sparse);
  if (!in_backward) throw UsageError("ready: no backward is open; call begin_step first");
  double& ready_s = record.ready_s[static_cast<size_t>(tensor)];
  if (ready_s > 0) {
    throw UsageError("the gradient of '" + plan.tensors()[static_cast<size_t>(tensor)].name +
                     "' became ready twice in one step");
  }
  ready_s = now_s();
}

void Engine::State::end_ready(int tensor) {
  ++ready_count;
  queued(step.ready(tensor).queued, record.ready_s[static_cast<size_t>(tensor)]);
  // An op in flight or a later head cannot become launchable here, so only the head matters.
  if (launchable() && !launching) work.notify_one();
}

void Engine::State::take(int tensor, const void* gradient) const {
  const TensorSpec& spec = plan.tensors()[static_cast<size_t>(tensor)];
  std::byte* const target = arena + plan.byte_offset(spec.offset);
  scaled_copy(spec.dtype, gradient, target, spec.numel, options.scale);
}

void Engine::State::set_fault(std::string message) {
  if (!fault.empty()) return;
  fault = message.empty() ? "communication failed" : std::move(message);
  arrived.notify_all();
  work.notify_all();
}

// Hands the current step to the timeline, once.
void Engine::State::post_record() {
  if (!posted && writer && writer->steps().contains(record.step)) {
    if (device) {
      unpassed.push_back(device->record());
      unpassed.back().step = record.step;
      unpassed.back().sparse = record.sparse;
    } else {
      outbox.push_back(record);
    }
  }
  posted = true;
}

// Ops may queue inside the backend, so it counts as a stall only if nothing completes.
double Engine::State::waiting_since() const {
  return std::max(record.launched_s[oldest], last_done_s);
}

std::string Engine::State::failed(int op, int64_t in_step, const std::string& why) const {
  return plan.describe(op) + " of step " + std::to_string(in_step) + " failed: " + why;
}

void Engine::State::abort() {
  if (coding) coding->halt();
  communicator.abort();
  if (sparse) sparse->abort();  // may need Python's lock, whose holder may wait for the device
}

void Engine::State::end_with(const std::string& message) {
  std::unique_lock lock(mutex);
  if (ended) return;
  set_fault(message);
  if (!launching) return;  // the engine's thread aborts
  ++failers;
  looked = true;
  // Somebody may look just now; the caller may hold what a warning needs meanwhile.
  arrived.wait_for(lock, std::chrono::seconds(1), [this] { return !writing; });
  lock.unlock();
  abort();
  lock.lock();
  --failers;
  arrived.notify_all();
}

void Engine::State::fail(int op, const std::string& why) {
  if (fault.empty() && !raw_fault) raw_fault = failed(op, record.step, why);
  work.notify_one();
}

void Engine::State::complete(int op, const std::exception_ptr& error,
                             const std::shared_ptr<State>& self) {
  const std::string why = error ? what(error) : "";
  std::unique_lock lock(mutex);
  if (error) {
    step.fail(op);
    return fail(op, why);
  }
  arrive(op);
  if (launchable() && !launching) {
    launch_all(lock, self);
  } else if (to_signal && !launchable()) {
    signal_waiters();
  }
  if (stopping) work.notify_one();
}

// The network has done its part.
void Engine::State::arrive(int op) {
  if (!step.coded(op)) return finish(op);
  step.received(op);
  if (device) device->received(op);
  watch_device(op);
  ++coding_jobs;
  coding->decode(op, turns[static_cast<size_t>(op)]);
}

void Engine::State::finish(int op) {
  const double now = now_s();
  if (!step.coded(op)) watch_device(op);
  record.done_s[static_cast<size_t>(op)] = last_done_s = now;
  // What is on a stream has been enqueued by now; `watch` sees it end.
  if (!device || !communicator.stream_ordered()) flights.done(record.step, op, now);
  if (std::exchange(warned, false)) work.notify_one();  // it sleeps until the limit
  const Step::Change change = step.complete(op);
  queued(change.queued, now);
  while (oldest < step.launched() && record.done_s[oldest] > 0) ++oldest;
  // A waiter that goes on takes the core, or Python's lock, from the thread that keeps the network
  // busy; so that one goes first. It is this one, since another would have to be woken.
  if (!change.arrived.empty() || step.reduced()) to_signal = true;
}

// What is on a stream is looked after there.
void Engine::State::watch_device(int op) {
  if (device && communicator.stream_ordered()) {
    launched.push_back(device->launched(op, record.step));
    if (open_step == 0) open_step = record.step;
  }
}

// The report of `coding`.
void Engine::State::coded(int op, const std::exception_ptr& error, bool decoded) {
  const std::string why = error ? what(error) : "";
  std::lock_guard lock(mutex);
  --coding_jobs;
  if (error) return fail(op, why);
  if (raw_fault || !fault.empty()) return work.notify_one();
  if (decoded) {
    finish(op);
  } else {
    step.encoded(op);
  }
  if (to_signal) signal_waiters();
  work.notify_one();
}

// The report of `sparse`.
void Engine::State::summed(int op, const SparseTraffic& traffic, const std::exception_ptr& error) {
  const std::string why = error ? what(error) : "";
  std::lock_guard lock(mutex);
  if (error) {
    step.fail(op);
    return fail(op, why);
  }
  record.sparse[op] = traffic;
  arrive(op);
  if (to_signal && !launchable()) signal_waiters();
  work.notify_one();
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
    const double now = record.launched_s[static_cast<size_t>(op)] = now_s();
    flights.launched(record.step, op, now);
    lock.unlock();
    launch(op, self);
    lock.lock();
    if (to_signal) signal_waiters();
  }
  launching = false;
  if (to_signal) signal_waiters();  // a fault came between
  if (!watching) work.notify_one();
}

// Without the lock. Only who has set `launching` is here, so `requests` needs none.
void Engine::State::launch(int op, const std::shared_ptr<State>& self) noexcept {
  const bool is_sparse = plan.ops()[static_cast<size_t>(op)].sparse.has_value();
  const bool by_scheme = !plan.ops()[static_cast<size_t>(op)].adds_by().empty();
  if (by_scheme && !(is_sparse && device)) return sparse->start(op);
  Request& request = requests[static_cast<size_t>(op)];
  const Completion done = [self, op](std::exception_ptr error) { self->complete(op, error, self); };
  if (!device) return communicator.launch(step.coded(op) ? coding->request(op) : request, done);
  const NamedRange shown = device->range(op);
  if (step.coded(op)) return communicator.launch(coding->request(op), done);
  try {
    request.order = device->order(op);
  } catch (const Error&) {
    return done(std::current_exception());
  }
  if (is_sparse) return sparse->start(op, *request.order);
  communicator.launch(request, done);
}

void Engine::State::judge_stall(int op, int64_t in_step, double waited,
                                std::unique_lock<std::mutex>& lock) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3g s", waited);
  const std::string text = plan.describe(op) + " of step " + std::to_string(in_step) +
                           " has not completed for " + seconds;
  if (waited >= options.stall_limit_s) {
    raw_fault = text + ", the stall limit";
  } else if (waited >= options.stall_warning_s && !warned) {
    warned = true;
    lock.unlock();
    warn_of_stall(text + "; a rank may be slow, stuck or lost");
    lock.lock();
  }
}

void Engine::State::warn_of_stall(std::string text) const {
  try {
    if (options.on_stall) text = options.on_stall(text);
  } catch (const std::exception&) {
    // What is known here is said all the same.
  }
  warn(text);
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

StepRecord Engine::State::device_times() const { return device->record().resolve(device->clock()); }

bool Engine::State::device_busy() const {
  return device && (!watch.empty() || !launched.empty() || !unpassed.empty());
}

// What a device does is looked at now and then, as nothing tells the host of it.
void Engine::State::poll_device(std::unique_lock<std::mutex>& lock) {
  for (LaunchedOp& op : std::exchange(launched, {})) watch.add(std::move(op));
  std::deque<DeviceRecord> records = std::exchange(unpassed, {});
  const bool ends = looked;
  writing = true;
  lock.unlock();
  std::string problem;
  std::optional<DeviceWatch::Waiting> waiting;
  std::vector<StepRecord> resolved;
  try {
    waiting = watch.look(device->clock(), now_s());
    problem = communicator.failure();
    while (!records.empty() && records.front().passed(device->clock())) {
      resolved.push_back(records.front().resolve(device->clock()));
      records.pop_front();
    }
    // It may wait for the device, which may wait for the abort.
    if (!resolved.empty() && !ends) device->clock().anchor();
  } catch (const Error& e) {
    problem = e.what();
  }
  lock.lock();
  for (const LaunchedOp& op : watch.take_passed()) flights.done(op.step, op.op, polled_s);
  const LaunchedOp* open = watch.oldest();
  if (!open && !launched.empty()) open = &launched.front();
  open_step = open ? open->step : 0;
  for (StepRecord& r : resolved) outbox.push_back(std::move(r));
  unpassed.insert(unpassed.begin(), records.begin(), records.end());
  writing = false;
  arrived.notify_all();
  if (!problem.empty() && fault.empty() && !raw_fault) {
    const LaunchedOp* op = watch.oldest();
    raw_fault = op ? failed(op->op, op->step, problem) : problem;
  }
  if (waiting && fault.empty() && !raw_fault) {
    judge_stall(waiting->op, waiting->step, polled_s - waiting->since_s, lock);
  }
}

// Nothing of this engine may be on the device's streams when it is gone; after a fault as far as
// that can be waited for.
void Engine::State::end_device(std::unique_lock<std::mutex>& lock) {
  constexpr double kMost_s = 1;
  const bool failed = !fault.empty();
  lock.unlock();
  std::string problem;
  try {
    if (failed) {
      device->ends_within(kMost_s);
    } else {
      device->synchronize();
    }
  } catch (const Error& e) {
    problem = e.what();
  }
  lock.lock();
  if (!problem.empty()) set_fault(problem);
}

void Engine::State::run(const std::shared_ptr<State>& self) {
  std::unique_lock lock(mutex);
  running = true;
  arrived.notify_all();
  for (;;) {
    const bool in_flight = step.in_flight() > 0 || coding_jobs > 0;
    const bool failed = raw_fault || !fault.empty();
    if (failed && !aborted) {
      aborted = true;
      // What has ended by now is whole, and what ends later need not be.
      if (!std::exchange(looked, true) && device_busy()) {
        polled_s = now_s();
        poll_device(lock);
      }
      lock.unlock();
      abort();  // first, as a device waits for it, and the host for that
      lock.lock();
    } else if (raw_fault && fault.empty()) {
      report_fault(lock);
    } else if (launchable() && !launching) {
      launch_all(lock, self);
    } else if (device_busy() && !failed && now_s() >= polled_s + poll_interval_s()) {
      polled_s = now_s();
      poll_device(lock);
    } else if (!outbox.empty()) {
      write_outbox(lock);
    } else if (stopping && !launching && (failed || !(in_flight || device_busy()))) {
      if (posted) {
        if (device) end_device(lock);
        return;
      }
      post_record();
    } else {
      sleep(lock);
    }
  }
}

// Until something changes, or it is time to look at the device or at what stalls.
void Engine::State::sleep(std::unique_lock<std::mutex>& lock) {
  std::optional<double> deadline;
  if (device_busy() && fault.empty()) deadline = polled_s + poll_interval_s();
  if (step.in_flight() > 0 && fault.empty() && oldest < step.launched()) {
    const double bound =
        warned ? options.stall_limit_s : std::min(options.stall_warning_s, options.stall_limit_s);
    const double stall = waiting_since() + bound;
    if (const double now = now_s(); now >= stall) {
      return judge_stall(static_cast<int>(oldest), record.step, now - waiting_since(), lock);
    }
    deadline = std::min(deadline.value_or(stall), stall);
  }
  if (!deadline) return work.wait(lock);
  watching = true;
  work.wait_until(lock, at(*deadline));
  watching = false;
}

}  // namespace usbyte
