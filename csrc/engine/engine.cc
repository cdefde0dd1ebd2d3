#include "usbyte/engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "step_record.h"
#include "usbyte/admission.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(100);

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

// Everything about an op that does not change from step to step.
struct OpInfo {
  Request request;
  int64_t bytes;
  std::vector<int> tensors;
  std::vector<int> gathers;  // all_gather ops that need this reduce_scatter
  int inputs;                // tensors (or reduce_scatters, for an all_gather) it waits for
};

}  // namespace

// Ownership: the caller's threads and communicator threads change the fields below only with
// `mutex` held, and never call out (communicator, callbacks, files) while holding it. Only the
// engine's thread launches ops, writes the timeline and calls back. Completions hold the State
// alive, so one that comes after the Engine's end is harmless.
struct Engine::State {
  State(Plan p, std::byte* arena, Communicator& c, EngineOptions o);

  // Constant after construction.
  const Plan plan;
  Communicator& communicator;
  EngineOptions options;
  std::vector<OpInfo> ops;
  std::vector<std::vector<int>> ops_of_tensor;  // ops that wait for its gradient
  std::vector<int> ops_to_arrive;               // by tensor: ops after which it has arrived

  mutable std::mutex mutex;
  std::condition_variable work;     // signals the engine's thread
  std::condition_variable arrived;  // signals waiters
  bool running = false;
  bool stopping = false;
  std::string fault;                     // not empty: final
  std::optional<std::string> raw_fault;  // found here, not yet told to on_fault

  bool in_backward = false;
  int ready_count = 0;
  std::vector<int> op_inputs;       // inputs an op still waits for
  std::vector<int> tensor_pending;  // ops a tensor still waits for
  size_t next = 0;                  // first op not launched
  size_t oldest = 0;                // first op not completed
  size_t completed = 0;
  Admission admission;
  double last_done_s = 0;  // when an op last completed
  bool warned = false;     // about what has been in flight since
  StepRecord record;
  bool posted = true;  // `record` is in the outbox, or was not wanted

  std::shared_ptr<TimelineWriter> writer;
  std::vector<StepRecord> outbox;  // finished records, for the engine's thread to write
  bool writing = false;

  std::thread thread;

  void check() const {
    if (!fault.empty()) throw FaultError(fault);
  }
  void check_index(int tensor) const {
    if (tensor < 0 || tensor >= static_cast<int>(plan.tensors().size())) {
      throw UsageError("tensor index " + std::to_string(tensor) + " is outside the plan's " +
                       std::to_string(plan.tensors().size()) + " tensors");
    }
  }
  bool drained() const { return completed == ops.size(); }
  bool launchable() const {
    return fault.empty() && !raw_fault && !(stopping && in_backward) && next < ops.size() &&
           op_inputs[next] == 0 && admission.admits(plan.ops()[next], ops[next].bytes);
  }
  // Ops may queue inside the backend, so it counts as a stall only if nothing completes.
  double waiting_since() const { return std::max(record.launched_s[oldest], last_done_s); }
  void input_arrived(int op, double now) {
    if (--op_inputs[static_cast<size_t>(op)] == 0) record.queued_s[static_cast<size_t>(op)] = now;
  }
  void set_fault(std::string message) {
    if (!fault.empty()) return;
    fault = message.empty() ? "communication failed" : std::move(message);
    arrived.notify_all();
    work.notify_all();
  }
  // Hands the current step to the timeline, once.
  void post_record() {
    if (!posted && writer && writer->steps().contains(record.step)) outbox.push_back(record);
    posted = true;
  }

  void run(const std::shared_ptr<State>& self);
  void warn(const std::string& text) const;
  void launch_next(std::unique_lock<std::mutex>& lock, const std::shared_ptr<State>& self);
  void complete(size_t op, const std::exception_ptr& error);
  void watch_stall(double now, std::unique_lock<std::mutex>& lock);
  void report_fault(std::unique_lock<std::mutex>& lock);
  void write_outbox(std::unique_lock<std::mutex>& lock);
  template <typename Done>
  void block(std::unique_lock<std::mutex>& lock, const std::function<void()>& poll, Done done);
};

Engine::State::State(Plan p, std::byte* arena, Communicator& c, EngineOptions o)
    : plan(std::move(p)), communicator(c), options(std::move(o)) {
  const size_t tensors = plan.tensors().size();
  ops_of_tensor.resize(tensors);
  ops_to_arrive.assign(tensors, 0);
  std::map<Block, size_t> scattered_by;
  for (size_t i = 0; i < plan.ops().size(); ++i) {
    const Op& op = plan.ops()[i];
    OpInfo info{{op.kind, plan.dtype(op.blocks.front()), ReduceOp::sum, 0, {}, {}},
                plan.bytes(op),
                plan.tensors_of(op),
                {},
                0};
    for (Block b : op.blocks) {
      info.request.recv.push_back({arena + plan.byte_offset(b.begin), b.numel()});
    }
    if (op.kind == Collective::all_gather) {
      for (Block b : op.blocks) {
        std::vector<int>& gathers = ops[scattered_by.at(b)].gathers;
        if (gathers.empty() || gathers.back() != static_cast<int>(i)) {
          gathers.push_back(static_cast<int>(i));
          ++info.inputs;
        }
      }
    } else {
      info.inputs = static_cast<int>(info.tensors.size());
      for (int t : info.tensors)
        ops_of_tensor[static_cast<size_t>(t)].push_back(static_cast<int>(i));
      for (Block b : op.blocks) scattered_by[b] = i;
    }
    if (op.kind != Collective::reduce_scatter) {
      for (int t : info.tensors) ++ops_to_arrive[static_cast<size_t>(t)];
    }
    ops.push_back(std::move(info));
  }
  tensor_pending.assign(tensors, 0);
  record.step = options.steps_before;
  next = oldest = completed = ops.size();
}

void Engine::State::complete(size_t op, const std::exception_ptr& error) {
  const std::string message = error ? what(error) : "";
  std::lock_guard lock(mutex);
  admission.completed(ops[op].bytes);
  if (error) {
    if (fault.empty() && !raw_fault) {
      raw_fault = plan.describe(static_cast<int>(op)) + " of step " + std::to_string(record.step) +
                  " failed: " + message;
    }
    work.notify_one();
    return;
  }
  const double now = now_s();
  record.done_s[op] = last_done_s = now;
  warned = false;
  ++completed;
  if (op == oldest) {
    while (oldest < next && record.done_s[oldest] > 0) ++oldest;
  }
  bool arrival = completed == ops.size();
  if (plan.ops()[op].kind == Collective::reduce_scatter) {
    for (int gather : ops[op].gathers) input_arrived(gather, now);
  } else {
    for (int t : ops[op].tensors) arrival |= --tensor_pending[static_cast<size_t>(t)] == 0;
  }
  if (arrival) arrived.notify_all();
  if (stopping || launchable()) work.notify_one();
}

void Engine::State::launch_next(std::unique_lock<std::mutex>& lock,
                                const std::shared_ptr<State>& self) {
  const size_t op = next++;
  admission.launched(ops[op].bytes);
  record.launched_s[op] = now_s();
  lock.unlock();
  communicator.launch(ops[op].request,
                      [self, op](std::exception_ptr error) { self->complete(op, error); });
  lock.lock();
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
    const bool in_flight = admission.ops_in_flight() > 0;
    if (raw_fault && fault.empty()) {
      report_fault(lock);
    } else if (launchable()) {
      launch_next(lock, self);
    } else if (!outbox.empty()) {
      write_outbox(lock);
    } else if (stopping && (!in_flight || !fault.empty())) {
      if (posted) return;
      post_record();
    } else if (in_flight && fault.empty() && oldest < next) {
      const double bound =
          warned ? options.stall_limit_s : std::min(options.stall_warning_s, options.stall_limit_s);
      const double deadline = waiting_since() + bound;
      if (const double now = now_s(); now >= deadline) {
        watch_stall(now, lock);
      } else {
        work.wait_until(lock, at(deadline));
      }
    } else {
      work.wait(lock);
    }
  }
}

template <typename Done>
void Engine::State::block(std::unique_lock<std::mutex>& lock, const std::function<void()>& poll,
                          Done done) {
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

Engine::Engine(Plan plan, std::byte* arena, Communicator& communicator, EngineOptions options)
    : state_(std::make_shared<State>(std::move(plan), arena, communicator, std::move(options))) {
  state_->thread = std::thread([state = state_] { state->run(state); });
  std::unique_lock lock(state_->mutex);
  state_->arrived.wait(lock, [this] { return state_->running; });
}

Engine::~Engine() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->work.notify_all();
  }
  state_->thread.join();
  // Late completions keep the state alive; what the callbacks refer to need not be.
  state_->options.on_warning = {};
  state_->options.on_fault = {};
}

const Plan& Engine::plan() const { return state_->plan; }

void Engine::begin_step() {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  s.check();
  if (s.in_backward || !s.drained()) {
    throw UsageError("begin_step: step " + std::to_string(s.record.step) + " is not drained");
  }
  s.post_record();
  if (!s.outbox.empty()) s.work.notify_one();
  s.posted = false;
  s.in_backward = true;
  s.ready_count = 0;
  s.next = s.oldest = s.completed = 0;
  s.warned = false;
  s.tensor_pending = s.ops_to_arrive;
  s.op_inputs.resize(s.ops.size());
  for (size_t i = 0; i < s.ops.size(); ++i) s.op_inputs[i] = s.ops[i].inputs;
  ++s.record.step;
  s.record.ready_s.assign(s.plan.tensors().size(), 0);
  s.record.queued_s.assign(s.ops.size(), 0);
  s.record.launched_s.assign(s.ops.size(), 0);
  s.record.done_s.assign(s.ops.size(), 0);
  s.record.gates.clear();
  s.record.updates.clear();
}

void Engine::ready(int tensor) {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  s.check();
  s.check_index(tensor);
  const size_t t = static_cast<size_t>(tensor);
  if (!s.in_backward) throw UsageError("ready: no backward is open; call begin_step first");
  if (s.record.ready_s[t] > 0) {
    throw UsageError("the gradient of '" + s.plan.tensors()[t].name +
                     "' became ready twice in one step");
  }
  const double now = now_s();
  s.record.ready_s[t] = now;
  ++s.ready_count;
  for (int op : s.ops_of_tensor[t]) s.input_arrived(op, now);
  // An op in flight or a later head cannot become launchable here, so only the head matters.
  if (s.launchable()) s.work.notify_one();
}

std::vector<int> Engine::unready() const {
  std::lock_guard lock(state_->mutex);
  std::vector<int> out;
  for (size_t t = 0; t < state_->record.ready_s.size(); ++t) {
    if (state_->record.ready_s[t] == 0) out.push_back(static_cast<int>(t));
  }
  return out;
}

void Engine::end_backward() {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  s.check();
  if (!s.in_backward) throw UsageError("end_backward: no backward is open");
  if (s.ready_count != static_cast<int>(s.plan.tensors().size())) {
    for (size_t t = 0; t < s.record.ready_s.size(); ++t) {
      if (s.record.ready_s[t] == 0) {
        throw UsageError("end_backward: the gradient of '" + s.plan.tensors()[t].name +
                         "' is not ready");
      }
    }
  }
  s.in_backward = false;
}

void Engine::wait(int tensor, const std::function<void()>& poll) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.check();
  s.check_index(tensor);
  int& pending = s.tensor_pending[static_cast<size_t>(tensor)];
  if (pending == 0) return;
  const double start = now_s();
  s.block(lock, poll, [&] { return pending == 0; });
  if (s.writer) s.record.gates.push_back({tensor, {start, now_s()}});
}

void Engine::drain(const std::function<void()>& poll) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.check();
  s.block(lock, poll, [&] { return s.drained(); });
}

void Engine::fail(const std::string& message) {
  std::lock_guard lock(state_->mutex);
  state_->set_fault(message);
}

std::string Engine::fault() const {
  std::lock_guard lock(state_->mutex);
  return state_->fault;
}

int64_t Engine::steps() const {
  std::lock_guard lock(state_->mutex);
  return state_->record.step;
}

std::string Engine::status() const {
  constexpr size_t kNamed = 4;
  const State& s = *state_;
  std::lock_guard lock(s.mutex);
  nlohmann::ordered_json awaited = nlohmann::ordered_json::array();
  if (s.in_backward) {
    for (size_t t = 0; t < s.record.ready_s.size() && awaited.size() < kNamed; ++t) {
      if (s.record.ready_s[t] == 0) awaited.push_back(s.plan.tensors()[t].name);
    }
  }
  return nlohmann::ordered_json{
      {"step", s.record.step},
      {"phase", s.in_backward ? "backward" : s.drained() ? "idle" : "flight"},
      {"launched", s.next},
      {"completed", s.completed},
      {"ops", s.ops.size()},
      {"awaited", std::move(awaited)}}
      .dump();
}

std::vector<double> Engine::ready_times() const {
  std::lock_guard lock(state_->mutex);
  return state_->record.ready_s;
}

std::vector<Sample> Engine::samples() const {
  const State& s = *state_;
  std::lock_guard lock(s.mutex);
  std::vector<Sample> out;
  for (size_t i = 0; i < s.record.done_s.size(); ++i) {
    if (s.record.done_s[i] > 0) {
      out.push_back({s.ops[i].bytes, s.record.done_s[i] - s.record.launched_s[i]});
    }
  }
  return out;
}

void Engine::set_timeline(std::shared_ptr<TimelineWriter> writer) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  if (s.drained() && !s.in_backward) s.post_record();
  s.posted = true;  // the new writer starts with the next step
  s.work.notify_all();
  s.arrived.wait(lock, [&] { return s.outbox.empty() && !s.writing; });
  s.writer = std::move(writer);
}

void Engine::record_update(const std::vector<int>& tensors, double start_s, double end_s) {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  for (int t : tensors) s.check_index(t);
  if (s.writer) s.record.updates.push_back({tensors, {start_s, end_s}});
}

}  // namespace usbyte
