// SPDX-License-Identifier: Apache-2.0
#include "usbyte/engine.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "engine_state.h"
#include "support/keep_forever.h"
#include "usbyte/error.h"

namespace usbyte {

Engine::Engine(Plan plan, std::byte* flat_buffer, Communicator& communicator, EngineOptions options)
    : state_(
          std::make_shared<State>(std::move(plan), flat_buffer, communicator, std::move(options))) {
  state_->thread = std::thread([state = state_] { state->run(state); });
  MutexLock lock(state_->mutex);
  while (!state_->running) state_->changed.wait(state_->mutex);
}

Engine::~Engine() {
  State& s = *state_;
  bool stuck;
  {
    MutexLock lock(s.mutex);
    s.stopping = true;
    s.work.notify_all();
    stuck = s.launches.launching() && s.faults.is_final();
  }
  if (stuck) s.abort();
  s.thread.join();
  bool failed;
  {
    MutexLock lock(s.mutex);
    while (s.faults.external()) s.changed.wait(s.mutex);
    s.faults.close();
    failed = s.faults.is_final();
  }
  s.sparse.reset();
  if (s.coding) s.coding->stop();
  const bool quiesced = s.coding && s.coding->quiesce();
  // The network may still write to the messages of ops that have failed.
  if (s.coding && failed && !quiesced) keep_forever(state_);
  // Late completions keep the state alive; what the callbacks refer to need not be.
  state_->options.on_warning = {};
  state_->options.on_stall = {};
  state_->options.on_fault = {};
}

const Plan& Engine::plan() const { return state_->plan; }

void Engine::begin_step(CudaStream stream) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.faults.check();
  s.launches.check_can_begin();
  if (s.device) s.device->check_not_captured(stream);
  s.post_record();
  if (s.outbox.has_records()) s.work.notify_one();
  s.outbox.begin_step();
  s.launches.begin_step();
  const bool timed = s.options.timed || s.outbox.records();
  if (s.device) s.on_device([&] { s.device->begin(stream, timed); });
}

std::vector<int> Engine::ready(int tensor, CudaStream stream, const void* gradient) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.begin_ready(tensor, false);
  std::vector<int> packed;
  if (s.device) {
    s.on_device([&] { packed = s.device->gradient(tensor, stream, gradient); });
  } else if (gradient) {
    MutexUnlock unlocked(s.mutex);
    s.copy_scaled_gradient(tensor, gradient);
  }
  s.end_ready(tensor);
  return packed;
}

void Engine::ready_rows(int tensor, RowsView rows, CudaStream stream, const int64_t* count) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.begin_ready(tensor, true);
  s.sparse->give(tensor, {rows, count});
  if (s.device) s.on_device([&] { s.device->gradient(tensor, stream, nullptr); });
  s.end_ready(tensor);
}

SparseSum Engine::take_rows(int tensor) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.faults.check();
  s.check_tensor(tensor, true);
  if (!s.launches.step().arrived(tensor)) throw UsageError("take_rows: wait for the tensor first");
  return s.sparse->take(tensor);
}

std::vector<int> Engine::unready() const {
  MutexLock lock(state_->mutex);
  return state_->launches.unready();
}

void Engine::end_backward() {
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.faults.check();
  s.launches.end_backward();
}

void Engine::wait(int tensor, const std::function<void()>& poll, CudaStream stream) {
  State& s = *state_;
  const Moment began = s.device ? s.device->begin_wait(stream) : Moment();
  {
    MutexLock lock(s.mutex);
    s.faults.check();
    s.check_index(tensor);
    s.block_and_record(tensor, poll, [&] {
      s.mutex.assume_held();
      return s.launches.step().arrived(tensor);
    });
  }
  if (s.device) s.device->wait(tensor, stream, began);
}

void Engine::wait_reduced(const std::function<void()>& poll, CudaStream stream) {
  State& s = *state_;
  const Moment began = s.device ? s.device->begin_wait(stream) : Moment();
  {
    MutexLock lock(s.mutex);
    s.faults.check();
    s.block_and_record(StepRecord::kEveryTensor, poll, [&] {
      s.mutex.assume_held();
      return s.launches.step().reduced();
    });
  }
  if (s.device) s.device->wait_reduced(stream, began);
}

void Engine::release_gathers(CudaStream stream) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.faults.check();
  s.launches.begin_release();
  if (s.device) s.on_device([&] { s.device->release(stream); });
  s.queued(s.launches.end_release(), now_s());
  s.work.notify_one();
}

void Engine::drain(const std::function<void()>& poll, CudaStream stream) {
  State& s = *state_;
  const Moment began = s.device ? s.device->begin_wait(stream) : Moment();
  {
    MutexLock lock(s.mutex);
    s.faults.check();
    s.block_and_record(StepRecord::kEveryTensor, poll, [&] {
      s.mutex.assume_held();
      return s.launches.step().drained();
    });
  }
  if (s.device) s.device->wait_all(stream, began);
}

void Engine::fail(const std::string& message) { state_->fail_externally(message); }

std::function<void(const std::string&)> Engine::fail_callback() const {
  return [state = state_](const std::string& message) { state->fail_externally(message); };
}

std::string Engine::fault() const {
  MutexLock lock(state_->mutex);
  return state_->faults.message();
}

int64_t Engine::steps() const {
  MutexLock lock(state_->mutex);
  return state_->launches.number();
}

std::string Engine::status() const {
  constexpr size_t kNamed = 4;
  const State& s = *state_;
  MutexLock lock(s.mutex);
  const Step& step = s.launches.step();
  nlohmann::ordered_json awaited = nlohmann::ordered_json::array();
  if (s.launches.in_backward()) {
    for (int t : s.launches.unready()) {
      if (awaited.size() == kNamed) break;
      awaited.push_back(s.plan.tensors()[static_cast<size_t>(t)].name);
    }
  }
  return nlohmann::ordered_json{{"step", s.launches.number()},
                                {"phase", s.launches.in_backward() ? "backward"
                                          : step.drained()         ? "idle"
                                                                   : "flight"},
                                {"launched", step.launched()},
                                {"completed", step.completed()},
                                {"ops", s.plan.ops().size()},
                                {"awaited", std::move(awaited)},
                                {"awaits_release", s.launches.awaits_release()},
                                {"open_step", s.device_ops.open_step()},
                                {"last", s.launches.flights(now_s())}}
      .dump();
}

std::vector<double> Engine::ready_times() const {
  if (state_->device) return state_->device_times().ready_s;
  MutexLock lock(state_->mutex);
  return state_->launches.record().ready_s;
}

std::vector<std::pair<double, double>> Engine::op_times() const {
  const State& s = *state_;
  const StepRecord record = s.device ? s.device_times() : [&] {
    MutexLock lock(s.mutex);
    return s.launches.record();
  }();
  std::vector<std::pair<double, double>> out;
  for (size_t i = 0; i < record.done_s.size(); ++i) {
    out.emplace_back(record.launched_s[i], record.done_s[i]);
  }
  return out;
}

void Engine::set_timelines(std::vector<std::shared_ptr<TimelineWriter>> writers) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  if (s.launches.idle()) s.post_record();
  s.outbox.set_posted();  // new writers start with the next step
  s.work.notify_all();
  while (s.outbox.has_records() || (s.outbox.has_device_records() && !s.faults.is_final()) ||
         s.outbox.busy()) {
    s.changed.wait(s.mutex);
  }
  s.outbox.set_writers(std::move(writers));
}

void Engine::record_update(const std::vector<int>& tensors, double start_s, double end_s) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  for (int t : tensors) s.check_index(t);
  if (s.outbox.records()) s.launches.add_update(tensors, start_s, end_s);
}

void Engine::record_update(const std::vector<int>& tensors, const Moment& start,
                           const Moment& end) {
  for (int t : tensors) state_->check_index(t);
  if (state_->device) state_->device->updated(tensors, start, end);
}

void Engine::record_pass(const std::string& name, double start_s, double end_s) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  if (s.outbox.records()) s.launches.add_pass(name, start_s, end_s);
}

void Engine::record_pass(const std::string& name, const Moment& start, const Moment& end) {
  if (state_->device) state_->device->add_pass(name, start, end);
}

}  // namespace usbyte
