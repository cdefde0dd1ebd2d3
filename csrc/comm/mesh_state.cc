// SPDX-License-Identifier: Apache-2.0
#include "mesh_state.h"

#include <algorithm>
#include <utility>

#include "mesh_fit.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

bool holds_others(const std::vector<std::thread::id>& threads) {
  return std::ranges::any_of(threads, [](auto id) { return id != std::this_thread::get_id(); });
}

void take_out(std::vector<std::thread::id>& threads) {
  threads.erase(std::ranges::find(threads, std::this_thread::get_id()));
}

// Made before the call, whose end would else still touch the text that others read.
std::exception_ptr fault_of(const std::string& why) {
  return why.empty() ? nullptr : std::make_exception_ptr(FaultError(why));
}

}  // namespace

MeshCommunicator::State::State(Topology t, std::shared_ptr<Communicator> f,
                               std::vector<std::shared_ptr<Communicator>> communicators)
    : topology(std::move(t)),
      rank(f->rank()),
      coordinates(topology.coordinates(rank)),
      ndim(communicators.size()),
      flat(std::move(f)),
      axis_groups(ndim) {
  for (size_t d = 0; d < ndim; ++d) axis_groups[d].communicator = std::move(communicators[d]);
}

void MeshCommunicator::State::leave() {
  take_out(inside);
  changed.notify_all();
}

std::string MeshCommunicator::State::invalid(const std::shared_ptr<const MeshSchedule>& schedule) {
  {
    MutexLock lock(mutex);
    const auto known = valid.find(schedule.get());
    if (known != valid.end() && !known->second.expired()) return "";
  }
  try {
    schedule->validate(topology);
  } catch (const UsageError& e) {
    return e.what();
  }
  MutexLock lock(mutex);
  std::erase_if(valid, [](const auto& known) { return known.second.expired(); });
  valid.insert_or_assign(schedule.get(), schedule);
  return "";
}

void MeshCommunicator::State::launch_flat(const Request& request, Completion done) {
  std::shared_ptr<Communicator> to;
  std::string why;
  {
    MutexLock lock(mutex);
    why = ended;
    if (why.empty()) {
      to = flat;
      enter();
      ++flat_in_flight;
    }
  }
  if (!to) return done(fault_of(why));
  // Shared, so that copies of what is launched do not keep what the completion holds.
  const auto held = std::make_shared<Completion>(std::move(done));
  to->launch(request, [self = shared_from_this(), held](std::exception_ptr error) {
    {
      MutexLock lock(self->mutex);
      self->calling.push_back(std::this_thread::get_id());
    }
    std::exchange(*held, nullptr)(std::move(error));
    MutexLock lock(self->mutex);
    take_out(self->calling);
    --self->flat_in_flight;
    self->changed.notify_all();
  });
  to.reset();
  MutexLock lock(mutex);
  leave();
}

void MeshCommunicator::State::start(const std::shared_ptr<MeshRequest>& mesh_request) {
  std::string why;
  {
    MutexLock lock(mutex);
    why = fault;
    if (why.empty()) {
      for (size_t d = 0; d < axis_groups.size(); ++d) {
        for (const ChunkPhase& next : mesh_request->order(d)) {
          axis_groups[d].waiting.push_back({mesh_request, next.chunk, next.phase});
        }
      }
      (mesh_request->left > 0 ? open : over).push_back(mesh_request);
    }
  }
  if (!why.empty()) return std::exchange(mesh_request->done, nullptr)(fault_of(why));
  go_on();
}

/// Launches what can be on all axis groups, and completes what is over.
void MeshCommunicator::State::go_on() {
  for (bool passes = true; passes;) {
    passes = false;
    for (size_t d = 0; d < ndim; ++d) passes |= launch_on(d);
  }
  deliver();
}

/// Whether phases passed at once, so that others may be launchable now.
bool MeshCommunicator::State::launch_on(size_t d) {
  bool passes = false;
  MutexLock lock(mutex);
  AxisGroup& group = axis_groups[d];
  while (!group.launching && !group.waiting.empty() && group.in_flight < kPhasesInFlight) {
    if (const Task& next = group.waiting.front();
        next.mesh_request->passed[static_cast<size_t>(next.chunk)] != next.phase) {
      break;
    }
    Task task = std::move(group.waiting.front());
    group.waiting.pop_front();
    const Request request = task.mesh_request->phase(task.chunk, task.phase);
    if (request.recv.empty()) {
      pass(task);
      passes = true;
      continue;
    }
    ++group.in_flight;
    ++task.mesh_request->in_flight;
    group.launching = true;
    std::shared_ptr<Communicator> to = group.communicator;
    enter();
    {
      MutexUnlock unlocked(mutex);
      to->launch(request, [self = shared_from_this(), d,
                           task = std::move(task)](const std::exception_ptr& error) {
        self->count(d, task, error);
        self->go_on();
      });
      to.reset();
    }
    group.launching = false;
    leave();
  }
  return passes;
}

/// A phase is over.
void MeshCommunicator::State::count(size_t d, const Task& task, const std::exception_ptr& error) {
  const std::string why = error ? what(error) : "";
  MutexLock lock(mutex);
  --axis_groups[d].in_flight;
  --task.mesh_request->in_flight;
  if (!error) pass(task);
  if (error && fault.empty()) {
    fault = phase_failure({0, task.chunk, task.phase}, topology.dimensions[d], why);
  }
  if (!fault.empty()) give_up();
}

void MeshCommunicator::State::pass(const Task& task) {
  ++task.mesh_request->passed[static_cast<size_t>(task.chunk)];
  if (--task.mesh_request->left > 0) return;
  std::erase(open, task.mesh_request);
  over.push_back(task.mesh_request);
}

/// After a fault: nothing else is launched, and what has nothing in flight is over.
void MeshCommunicator::State::give_up() {
  for (AxisGroup& group : axis_groups) group.waiting.clear();
  const auto [idle, end] = std::ranges::stable_partition(
      open, [](const auto& mesh_request) { return mesh_request->in_flight > 0; });
  over.insert(over.end(), idle, end);
  open.erase(idle, end);
}

void MeshCommunicator::State::deliver() {
  MutexLock lock(mutex);
  if (delivering) return;
  delivering = true;
  while (!over.empty()) {
    std::shared_ptr<MeshRequest> mesh_request = std::move(over.front());
    over.pop_front();
    const std::string why = mesh_request->left > 0 ? fault : "";
    calling.push_back(std::this_thread::get_id());
    {
      MutexUnlock unlocked(mutex);
      std::exchange(mesh_request->done, nullptr)(fault_of(why));
      mesh_request.reset();
    }
    take_out(calling);
  }
  delivering = false;
  changed.notify_all();
}

void MeshCommunicator::State::end(const std::string& why) {
  bool first = false;
  {
    MutexLock lock(mutex);
    first = ended.empty();
    if (first) ended = why;
    if (fault.empty()) fault = why;
    give_up();
  }
  deliver();
  std::vector<std::shared_ptr<Communicator>> all;
  MutexLock lock(mutex);
  all.push_back(flat);
  for (const AxisGroup& group : axis_groups) all.push_back(group.communicator);
  enter();
  {
    MutexUnlock unlocked(mutex);
    for (const auto& communicator : all) {
      if (communicator) communicator->abort();
    }
    all.clear();
  }
  leave();
  if (!first) return;
  while (holds_others(inside)) changed.wait(mutex);
  all.push_back(std::exchange(flat, nullptr));
  for (AxisGroup& group : axis_groups) all.push_back(std::exchange(group.communicator, nullptr));
}

std::string MeshCommunicator::State::failure() {
  MutexLock lock(mutex);
  std::shared_ptr<Communicator> from = flat;
  enter();
  std::string out;
  {
    MutexUnlock unlocked(mutex);
    if (from) out = from->failure();
    from.reset();
  }
  leave();
  return out;
}

/// Whether this thread is inside a completion.
bool MeshCommunicator::State::completing() const {
  return std::ranges::find(calling, std::this_thread::get_id()) != calling.end();
}

bool MeshCommunicator::State::idle() const {
  return open.empty() && over.empty() && flat_in_flight == 0 && !delivering && inside.empty();
}

}  // namespace usbyte
