#include "usbyte/engine.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "engine_state.h"
#include "support/keep_forever.h"
#include "usbyte/error.h"

namespace usbyte {

Engine::Engine(Plan plan, std::byte* arena, Communicator& communicator, EngineOptions options)
    : state_(std::make_shared<State>(std::move(plan), arena, communicator, std::move(options))) {
  state_->thread = std::thread([state = state_] { state->run(state); });
  std::unique_lock lock(state_->mutex);
  state_->arrived.wait(lock, [this] { return state_->running; });
}

Engine::~Engine() {
  bool stuck;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->work.notify_all();
    stuck = state_->launching && !state_->fault.empty();
  }
  if (stuck) state_->abort();
  state_->thread.join();
  {
    std::unique_lock lock(state_->mutex);
    state_->arrived.wait(lock, [this] { return state_->failers == 0; });
    state_->ended = true;
  }
  state_->sparse.reset();
  if (state_->coding) state_->coding->stop();
  const bool settled = state_->coding && state_->coding->settle();
  if (state_->coding && !state_->fault.empty() && !settled) {
    // The network may still write to the messages of ops that have failed.
    keep_forever(state_);
  }
  // Late completions keep the state alive; what the callbacks refer to need not be.
  state_->options.on_warning = {};
  state_->options.on_stall = {};
  state_->options.on_fault = {};
}

const Plan& Engine::plan() const { return state_->plan; }

void Engine::begin_step(CudaStream stream) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.check();
  if (s.in_backward || !s.step.drained()) {
    throw UsageError("begin_step: step " + std::to_string(s.record.step) + " is not drained");
  }
  if (s.device) s.device->check_not_captured(stream);
  s.post_record();
  if (!s.outbox.empty()) s.work.notify_one();
  s.posted = false;
  s.in_backward = true;
  s.ready_count = 0;
  s.step.begin();
  s.released = false;
  s.oldest = 0;
  s.warned = false;
  ++s.record.step;
  s.record.ready_s.assign(s.plan.tensors().size(), 0);
  s.record.queued_s.assign(s.plan.ops().size(), 0);
  s.record.launched_s.assign(s.plan.ops().size(), 0);
  s.record.done_s.assign(s.plan.ops().size(), 0);
  s.record.gates.clear();
  s.record.updates.clear();
  s.record.sparse.clear();
  const bool timed = s.options.timed || s.writer;
  if (s.device) s.on_device(lock, [&] { s.device->begin(stream, timed); });
}

std::vector<int> Engine::ready(int tensor, CudaStream stream, const void* gradient) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.begin_ready(tensor, false);
  std::vector<int> packed;
  if (s.device) {
    s.on_device(lock, [&] { packed = s.device->gradient(tensor, stream, gradient); });
  } else if (gradient) {
    lock.unlock();
    s.take(tensor, gradient);
    lock.lock();
  }
  s.end_ready(tensor);
  return packed;
}

void Engine::ready_rows(int tensor, RowsView rows, CudaStream stream, const int64_t* count) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.begin_ready(tensor, true);
  s.sparse->give(tensor, {rows, count});
  if (s.device) s.on_device(lock, [&] { s.device->gradient(tensor, stream, nullptr); });
  s.end_ready(tensor);
}

SparseSum Engine::take_rows(int tensor) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.check();
  s.check_tensor(tensor, true);
  if (!s.step.arrived(tensor)) throw UsageError("take_rows: wait for the tensor first");
  return s.sparse->take(tensor);
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

void Engine::wait(int tensor, const std::function<void()>& poll, CudaStream stream) {
  State& s = *state_;
  const Moment gate = s.device ? s.device->gate(stream) : Moment();
  {
    std::unique_lock lock(s.mutex);
    s.check();
    s.check_index(tensor);
    if (!s.step.arrived(tensor)) {
      const double start = now_s();
      s.block(lock, poll, [&] { return s.step.arrived(tensor); });
      if (s.writer && !s.device) s.record.gates.push_back({tensor, {start, now_s()}});
    }
  }
  if (s.device) s.device->wait(tensor, stream, gate);
}

void Engine::wait_reduced(const std::function<void()>& poll, CudaStream stream) {
  State& s = *state_;
  {
    std::unique_lock lock(s.mutex);
    s.check();
    s.block(lock, poll, [&] { return s.step.reduced(); });
  }
  if (s.device) s.device->wait_reduced(stream);
}

void Engine::release_gathers(CudaStream stream) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.check();
  if (!s.options.hold_gathers) throw UsageError("release_gathers: this engine does not hold them");
  if (s.released || !s.step.reduced()) {
    throw UsageError("release_gathers: already released, or not everything is reduced");
  }
  s.released = true;
  if (s.device) s.on_device(lock, [&] { s.device->release(stream); });
  s.queued(s.step.release_gathers().queued, now_s());
  s.work.notify_one();
}

void Engine::drain(const std::function<void()>& poll, CudaStream stream) {
  State& s = *state_;
  {
    std::unique_lock lock(s.mutex);
    s.check();
    s.block(lock, poll, [&] { return s.step.drained(); });
  }
  if (s.device) s.device->wait_all(stream);
}

void Engine::fail(const std::string& message) { state_->end_with(message); }

std::function<void(const std::string&)> Engine::failer() const {
  return [state = state_](const std::string& message) { state->end_with(message); };
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
  return nlohmann::ordered_json{{"step", s.record.step},
                                {"phase", s.in_backward      ? "backward"
                                          : s.step.drained() ? "idle"
                                                             : "flight"},
                                {"launched", s.step.launched()},
                                {"completed", s.step.completed()},
                                {"ops", s.plan.ops().size()},
                                {"awaited", std::move(awaited)},
                                {"held", s.options.hold_gathers && s.step.reduced() && !s.released},
                                {"open_step", s.open_step},
                                {"last", s.flights.to_json(s.plan, now_s())}}
      .dump();
}

std::vector<double> Engine::ready_times() const {
  if (state_->device) return state_->device_times().ready_s;
  std::lock_guard lock(state_->mutex);
  return state_->record.ready_s;
}

std::vector<std::pair<double, double>> Engine::op_times() const {
  const State& s = *state_;
  const StepRecord record = s.device ? s.device_times() : [&] {
    std::lock_guard lock(s.mutex);
    return s.record;
  }();
  std::vector<std::pair<double, double>> out;
  for (size_t i = 0; i < record.done_s.size(); ++i) {
    out.emplace_back(record.launched_s[i], record.done_s[i]);
  }
  return out;
}

void Engine::set_timeline(std::shared_ptr<TimelineWriter> writer) {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  if (s.step.drained() && !s.in_backward) s.post_record();
  s.posted = true;  // the new writer starts with the next step
  s.work.notify_all();
  s.arrived.wait(lock, [&] {
    return s.outbox.empty() && (s.unpassed.empty() || !s.fault.empty()) && !s.writing;
  });
  s.writer = std::move(writer);
}

void Engine::record_update(const std::vector<int>& tensors, double start_s, double end_s) {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  for (int t : tensors) s.check_index(t);
  if (s.writer) s.record.updates.push_back({tensors, {start_s, end_s}});
}

void Engine::record_update(const std::vector<int>& tensors, const Moment& start,
                           const Moment& end) {
  for (int t : tensors) state_->check_index(t);
  if (state_->device) state_->device->updated(tensors, start, end);
}

}  // namespace usbyte
