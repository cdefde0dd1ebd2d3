// SPDX-License-Identifier: Apache-2.0
#include "engine_state.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <optional>
#include <utility>

#include "plan/dimension_path.h"
#include "plan/plan_index.h"
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

void check_dimensions(const Plan& plan, const Communicator& communicator) {
  const auto along =
      std::ranges::find_if(plan.ops(), [](const Op& op) { return op.dimension >= 0; });
  if (along == plan.ops().end()) return;
  const auto what = [&] { return plan.describe(static_cast<int>(along - plan.ops().begin())); };
  if (!communicator.topology()) {
    throw UsageError(what() + ": the communicator has no such dimension");
  }
  usbyte::check_dimensions(plan, *communicator.topology());
}

}  // namespace

Engine::State::State(Plan p, std::byte* a, Communicator& c, EngineOptions o)
    : plan(std::move(p)),
      flat_buffer(a),
      communicator(c),
      options(std::move(o)),
      index(std::make_shared<const PlanIndex>(plan)),
      device(options.device ? std::make_unique<DeviceStep>(plan, index, flat_buffer, options.device,
                                                           options.scale, options.hold_gathers)
                            : nullptr),
      launches(plan, index, options.hold_gathers, options.steps_before) {
  check_dimensions(plan, communicator);
  for (const Op& op : plan.ops()) {
    Request request;
    request.kind = op.kind;
    request.dtype = plan.dtype(op);
    request.window_bytes = op.window_bytes;
    request.fence = op.fence;
    if (op.route) request.schedule = std::make_shared<const MeshSchedule>(*op.route);
    request.dimension = op.dimension;
    for (Block b : worked_on(op, communicator.topology(), communicator.rank())) {
      request.recv.push_back({flat_buffer + plan.byte_offset(b.begin), b.numel()});
    }
    requests.push_back(std::move(request));
  }
  const auto any = [this](auto is) { return std::ranges::any_of(plan.ops(), is); };
  if (any([](const Op& op) { return op.codec != "none"; })) {
    contexts.resize(plan.ops().size());
    const CodingSpace space{plan,
                            flat_buffer,
                            options.codec_state,
                            communicator.rank(),
                            communicator.size(),
                            options.seed,
                            options.device,
                            nullptr,
                            communicator.topology()};
    coding = std::make_unique<CodecWorker>(
        space, communicator.stream_ordered(),
        [this](int op, const std::exception_ptr& error) { coded(op, error, false); },
        [this](int op, const std::exception_ptr& error) { coded(op, error, true); });
  }
  if (any([](const Op& op) { return !op.sparse_scheme().empty(); })) {
    sparse = std::make_unique<SparseOps>(
        plan, coding.get(), options.exchange,
        any([](const Op& op) { return op.sparse.has_value(); }) ? options.device : nullptr,
        SparseOptions{options.scale, options.seed},
        [this](int op, const SparseTraffic& traffic, const std::exception_ptr& error) {
          summed(op, traffic, error);
        });
  }
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
  return !faults.any() && !(stopping && launches.in_backward()) && launches.step().launchable();
}

void Engine::State::queued(std::span<const int> ops, double now) {
  for (int op : ops) {
    launches.queued(op, now);
    if (!launches.step().coded(op)) continue;
    CodingContext& context = contexts[static_cast<size_t>(op)] = {launches.number()};
    if (device) {
      try {
        context.order = device->order(op);
      } catch (const Error& e) {
        return fail(op, e.what());
      }
      context.done = device->done(op);
    }
    ++coding_jobs;
    coding->encode(op, context);
  }
}

void Engine::State::begin_ready(int tensor, bool is_sparse) {
  faults.check();
  check_tensor(tensor, is_sparse);
  launches.begin_ready(tensor);
}

void Engine::State::end_ready(int tensor) {
  queued(launches.end_ready(tensor), launches.record().ready_s[static_cast<size_t>(tensor)]);
  // An op in flight or a later head cannot become launchable here, so only the head matters.
  if (launchable() && !launches.launching()) work.notify_one();
}

void Engine::State::copy_scaled_gradient(int tensor, const void* gradient) const {
  const TensorSpec& spec = plan.tensors()[static_cast<size_t>(tensor)];
  std::byte* const target = flat_buffer + plan.byte_offset(spec.offset);
  scaled_copy(spec.dtype, gradient, target, spec.numel, options.scale);
}

void Engine::State::set_fault(std::string message) {
  if (!faults.latch(std::move(message))) return;
  changed.notify_all();
  work.notify_all();
}

// Hands the current step to the timeline, once.
void Engine::State::post_record() {
  if (outbox.wants(launches.number())) {
    if (device) {
      DeviceRecord record = device->record();
      record.step = launches.number();
      record.sparse = launches.record().sparse;
      outbox.post(std::move(record));
    } else {
      outbox.post(launches.record());
    }
  }
  outbox.set_posted();
}

std::string Engine::State::failed(int op, int64_t in_step, const std::string& why) const {
  return plan.describe(op) + " of step " + std::to_string(in_step) + " failed: " + why;
}

void Engine::State::abort() {
  if (coding) coding->cancel();
  communicator.abort();
  if (sparse) sparse->abort();  // may need Python's lock, whose holder may wait for the device
}

void Engine::State::fail_externally(const std::string& message) {
  {
    MutexLock lock(mutex);
    if (faults.closed()) return;
    set_fault(message);
    if (!launches.launching()) return;  // the engine's thread aborts
    faults.enter();
    device_ops.set_final_poll_done();
    // The engine's thread may poll just now; the caller may hold what a warning needs meanwhile.
    const auto deadline = Clock::now() + std::chrono::seconds(1);
    while (outbox.busy()) {
      if (changed.wait_until(mutex, deadline) == std::cv_status::timeout) break;
    }
  }
  abort();
  MutexLock lock(mutex);
  faults.leave();
  changed.notify_all();
}

void Engine::State::fail(int op, const std::string& why) {
  faults.find(failed(op, launches.number(), why));
  work.notify_one();
}

void Engine::State::complete(int op, const std::exception_ptr& error,
                             const std::shared_ptr<State>& self) {
  const std::string why = error ? what(error) : "";
  MutexLock lock(mutex);
  if (error) {
    launches.fail(op);
    return fail(op, why);
  }
  arrive(op);
  if (launchable() && !launches.launching()) {
    launch_all(self);
  } else if (launches.waiters_pending() && !launchable()) {
    signal_waiters();
  }
  if (stopping) work.notify_one();
}

// The network has done its part.
void Engine::State::arrive(int op) {
  if (!launches.step().coded(op)) return finish(op);
  launches.received(op);
  if (device) device->received(op);
  watch_device(op);
  ++coding_jobs;
  coding->decode(op, contexts[static_cast<size_t>(op)]);
}

void Engine::State::finish(int op) {
  const double now = now_s();
  if (!launches.step().coded(op)) watch_device(op);
  // What is on a stream has been enqueued by now; the poller sees it end.
  if (!device || !communicator.stream_ordered()) launches.flight_done(launches.number(), op, now);
  if (launches.take_warned()) work.notify_one();  // it sleeps until the limit
  queued(launches.complete(op, now), now);
}

// What is on a stream is looked after there.
void Engine::State::watch_device(int op) {
  if (device && communicator.stream_ordered()) {
    device_ops.add(device->launched(op, launches.number()));
  }
}

// The report of `coding`.
void Engine::State::coded(int op, const std::exception_ptr& error, bool decoded) {
  const std::string why = error ? what(error) : "";
  MutexLock lock(mutex);
  --coding_jobs;
  if (error) return fail(op, why);
  if (faults.any()) return work.notify_one();
  if (decoded) {
    finish(op);
  } else {
    launches.encoded(op);
  }
  if (launches.waiters_pending()) signal_waiters();
  work.notify_one();
}

// The report of `sparse`.
void Engine::State::summed(int op, const SparseTraffic& traffic, const std::exception_ptr& error) {
  const std::string why = error ? what(error) : "";
  MutexLock lock(mutex);
  if (error) {
    launches.fail(op);
    return fail(op, why);
  }
  launches.add_traffic(op, traffic);
  arrive(op);
  if (launches.waiters_pending() && !launchable()) signal_waiters();
  work.notify_one();
}

void Engine::State::signal_waiters() {
  launches.waiters_signaled();
  changed.notify_all();
}

void Engine::State::launch_all(const std::shared_ptr<State>& self) noexcept {
  launches.begin_launching();
  launcher.assume();
  while (launchable()) {
    const int op = launches.launch();
    {
      MutexUnlock unlocked(mutex);
      launch(op, self);
    }
    if (launches.waiters_pending()) signal_waiters();
  }
  launches.end_launching();
  if (launches.waiters_pending()) signal_waiters();  // a fault came between
  if (!timed_sleep) work.notify_one();
}

// Without the lock, which `requests` does not need, as one thread launches at a time.
void Engine::State::launch(int op, const std::shared_ptr<State>& self) noexcept {
  const Op& planned = plan.ops()[static_cast<size_t>(op)];
  const bool is_sparse = planned.sparse.has_value();
  const bool by_scheme = !planned.sparse_scheme().empty();
  const bool is_coded = planned.codec != "none";
  if (by_scheme && !(is_sparse && device)) return sparse->start(op);
  Request& request = requests[static_cast<size_t>(op)];
  const Completion done = [self, op](std::exception_ptr error) { self->complete(op, error, self); };
  if (!device) return communicator.launch(is_coded ? coding->request(op) : request, done);
  const NamedRange shown = device->range(op);
  if (is_coded) return communicator.launch(coding->request(op), done);
  try {
    request.order = device->order(op);
  } catch (const Error&) {
    return done(std::current_exception());
  }
  if (is_sparse) return sparse->start(op, *request.order);
  communicator.launch(request, done);
}

void Engine::State::check_stall(int op, int64_t in_step, double waited) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3g s", waited);
  const std::string text = plan.describe(op) + " of step " + std::to_string(in_step) +
                           " has not completed for " + seconds;
  if (waited >= options.stall_limit_s) {
    faults.find(text + ", the stall limit");
  } else if (waited >= options.stall_warning_s && !launches.warned()) {
    launches.set_warned();
    MutexUnlock unlocked(mutex);
    warn_of_stall(text + "; a rank may be slow, stuck or lost");
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

void Engine::State::report_fault() {
  const std::string found = *faults.found();
  std::string message = found;
  {
    MutexUnlock unlocked(mutex);
    try {
      if (options.on_fault) message = options.on_fault(found);
      if (message.empty()) message = found;
    } catch (const std::exception& e) {
      message += std::string("; the cause is unknown: ") + e.what();
    }
  }
  faults.forget_found();
  set_fault(message);
  post_record();
}

void Engine::State::write_outbox() {
  const TimelineOutbox::Writers targets = outbox.writers();
  const std::vector<StepRecord> records = outbox.begin_write();
  TimelineOutbox::Writers failed;
  {
    MutexUnlock unlocked(mutex);
    std::vector<Timeline> timelines;
    for (const StepRecord& r : records) timelines.push_back(events(r, plan));
    for (const auto& target : targets) {
      try {
        for (const Timeline& timeline : timelines) target->write(timeline);
      } catch (const Error& e) {
        warn(std::string("timeline stopped: ") + e.what());
        failed.push_back(target);
      }
    }
  }
  outbox.end_write(failed);
  changed.notify_all();
}

StepRecord Engine::State::device_times() const { return device->record().resolve(device->clock()); }

bool Engine::State::device_busy() const {
  return device && (poller.oldest() || !device_ops.empty() || outbox.has_device_records());
}

void Engine::State::poll_device() {
  poller.begin(device_ops.take(), now_s());
  std::deque<DeviceRecord> records = outbox.begin_resolve();
  const bool last = device_ops.final_poll_done();
  DevicePoller::Findings found;
  {
    MutexUnlock unlocked(mutex);
    found = poller.look(device->clock(), communicator, records, last);
  }
  for (const LaunchedOp& op : poller.take_passed()) {
    launches.flight_done(op.step, op.op, poller.polled_s());
  }
  device_ops.update_open_step(poller.oldest());
  outbox.end_resolve(std::move(found.resolved), records);
  changed.notify_all();
  if (!found.problem.empty()) {
    const LaunchedOp* op = poller.oldest();
    faults.find(op ? failed(op->op, op->step, found.problem) : found.problem);
  }
  if (found.waiting && !faults.any()) {
    const DeviceOpTracker::Waiting& waiting = *found.waiting;
    check_stall(waiting.op, waiting.step, poller.polled_s() - waiting.since_s);
  }
}

// Nothing of this engine may be on the device's streams when it is gone; after a fault as far as
// that can be waited for.
void Engine::State::end_device() {
  constexpr double kMost_s = 1;
  const bool failed = faults.is_final();
  std::string problem;
  {
    MutexUnlock unlocked(mutex);
    try {
      if (failed) {
        device->ends_within(kMost_s);
      } else {
        device->synchronize();
      }
    } catch (const Error& e) {
      problem = e.what();
    }
  }
  if (!problem.empty()) set_fault(problem);
}

void Engine::State::run(const std::shared_ptr<State>& self) {
  engine_thread.assume();
  MutexLock lock(mutex);
  running = true;
  changed.notify_all();
  for (;;) {
    const bool in_flight = launches.step().in_flight() > 0 || coding_jobs > 0;
    const bool failed = faults.any();
    if (failed && faults.begin_abort()) {
      // What has ended by now is whole, and what ends later need not be.
      if (!device_ops.set_final_poll_done() && device_busy()) poll_device();
      MutexUnlock unlocked(mutex);
      abort();  // first, as a device waits for it, and the host for that
    } else if (faults.found() && !faults.is_final()) {
      report_fault();
    } else if (launchable() && !launches.launching()) {
      launch_all(self);
    } else if (device_busy() && !failed && now_s() >= poller.polled_s() + poll_interval_s()) {
      poll_device();
    } else if (outbox.has_records()) {
      write_outbox();
    } else if (stopping && !launches.launching() && (failed || !(in_flight || device_busy()))) {
      if (outbox.posted()) {
        if (device) end_device();
        return;
      }
      post_record();
    } else {
      sleep();
    }
  }
}

// Until something changes, or it is time to look at the device or at what stalls.
void Engine::State::sleep() {
  std::optional<double> deadline;
  if (device_busy() && !faults.is_final()) deadline = poller.polled_s() + poll_interval_s();
  if (const auto since = launches.waiting_since(); since && !faults.is_final()) {
    const double bound = launches.warned()
                             ? options.stall_limit_s
                             : std::min(options.stall_warning_s, options.stall_limit_s);
    const double stall = *since + bound;
    if (const double now = now_s(); now >= stall) {
      return check_stall(launches.oldest(), launches.number(), now - *since);
    }
    deadline = std::min(deadline.value_or(stall), stall);
  }
  if (!deadline) return work.wait(mutex);
  timed_sleep = true;
  work.wait_until(mutex, at(*deadline));
  timed_sleep = false;
}

}  // namespace usbyte
