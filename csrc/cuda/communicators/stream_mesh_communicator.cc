// SPDX-License-Identifier: Apache-2.0
#include "stream_mesh_communicator.h"

#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/cpu_collective.h"
#include "comm/mesh_fit.h"
#include "comm/mesh_request.h"
#include "simulator/mesh_simulator.h"
#include "stream_window.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

void check(const Topology& topology, const std::shared_ptr<Communicator>& flat,
           const std::vector<std::shared_ptr<Communicator>>& axis_groups, int slots) {
  check_mesh(topology, flat, axis_groups, true);
  if (slots < 1) throw UsageError("a mesh on streams needs one slot at least");
}

}  // namespace

struct StreamMeshCommunicator::State {
  /// A communicator, and when what was launched on it last may start.
  struct Place {
    std::shared_ptr<Communicator> communicator;
    CudaEvent started;
  };
  struct Slot {
    CudaStream stream;
    CudaEvent begun;  // all that its last request had to wait for is over
    CudaEvent done;   // its last request is over
  };
  using Phases = std::vector<LinePhase>;
  struct Known {
    std::weak_ptr<const MeshSchedule> schedule;  // another if its owner is
    std::map<int64_t, Phases> phases;            // by bytes
  };

  State(Topology t, std::shared_ptr<Cuda> device, std::shared_ptr<Communicator> all,
        std::vector<std::shared_ptr<Communicator>> along, int slots_at_most)
      : topology(std::move(t)),
        cuda(std::move(device)),
        rank(all->rank()),
        coordinates(topology.coordinates(rank)),
        window(slots_at_most),
        speeds(topology) {
    flat = {std::move(all), cuda->create_event(EventKind::ordering)};
    for (auto& group : along)
      axis_groups.push_back({std::move(group), cuda->create_event(EventKind::ordering)});
    for (int i = 0; i < slots_at_most; ++i) {
      slots.push_back({cuda->create_stream(true), cuda->create_event(EventKind::ordering),
                       cuda->create_event(EventKind::ordering)});
    }
  }
  ~State() {
    for (const Slot& slot : slots) {
      cuda->destroy(slot.stream);
      cuda->destroy(slot.begun);
      cuda->destroy(slot.done);
    }
    for (CudaEvent event : chunks) cuda->destroy(event);
    for (const Place& group : axis_groups) cuda->destroy(group.started);
    cuda->destroy(flat.started);
  }

  void enqueue(const Request& request);
  void execute(const Request& request, const Phases& phases, const Slot& slot);
  void launch_on(Place& place, Request part, CudaEvent after, CudaEvent done);
  const Phases& phases_of(const std::shared_ptr<const MeshSchedule>& schedule, int64_t bytes);
  template <typename Use>
  void with_all(Use use) {
    use(*flat.communicator);
    for (const Place& group : axis_groups) {
      if (group.communicator) use(*group.communicator);
    }
  }

  const Topology topology;
  const std::shared_ptr<Cuda> cuda;
  const int rank;
  const std::vector<int> coordinates;
  Place flat;                      // its communicator, and those of axis groups, stay as they are
  std::vector<Place> axis_groups;  // by dimension

  // Guards what is below, and lets launches of several threads follow one another. No completion
  // runs under it, and `abort` and `failure` do without it.
  std::mutex mutex;
  StreamWindow window;
  std::vector<Slot> slots;
  std::vector<CudaEvent> chunks;  // what was launched last of each is over
  const Place* last = nullptr;    // of the last launch
  const Slot* before = nullptr;   // of the last request
  Topology speeds;
  std::string fault;  // final: why requests with a schedule fail
  std::map<const MeshSchedule*, Known> known;
};

void StreamMeshCommunicator::State::enqueue(const Request& request) {
  const bool routed = request.schedule || request.dimension >= 0;
  std::string problem = routed ? mesh_problem(request, topology) : "";
  if (problem.empty() && !request.order) {
    problem = "a mesh on streams needs to know when a request may begin: give it an order";
  }
  if (!problem.empty()) throw UsageError(problem);
  std::lock_guard lock(mutex);
  if (request.schedule && !fault.empty()) throw FaultError(fault);
  const int64_t bytes = payload_bytes(request);
  const Phases* phases = request.schedule ? &phases_of(request.schedule, bytes) : nullptr;
  const StreamPlacement placement = window.place(bytes, request.window_bytes, request.fence);
  const Slot& slot = slots[static_cast<size_t>(placement.slot)];
  for (CudaEvent event : request.order->after) cuda->wait(slot.stream, event);
  for (int other : placement.after) {
    cuda->wait(slot.stream, slots[static_cast<size_t>(other)].done);
  }
  // As StreamWindow presumes: what was over when the one before began is over now.
  if (before && before != &slot) cuda->wait(slot.stream, before->begun);
  if (last) cuda->wait(slot.stream, last->started);
  before = &slot;
  cuda->record(request.order->started, slot.stream);
  cuda->record(slot.begun, slot.stream);
  if (phases) {
    execute(request, *phases, slot);
  } else if (Place& place =
                 request.dimension < 0 ? flat : axis_groups[static_cast<size_t>(request.dimension)];
             place.communicator) {
    Request part = request;
    part.dimension = -1;
    launch_on(place, std::move(part), slot.begun, slot.done);
    cuda->wait(slot.stream, slot.done);
  }
  cuda->record(slot.done, slot.stream);
  cuda->record(request.order->done, slot.stream);
}

void StreamMeshCommunicator::State::execute(const Request& request, const Phases& phases,
                                            const Slot& slot) {
  const MeshRequest mesh_request(request, nullptr, topology, coordinates);
  while (chunks.size() < request.schedule->routes.size()) {
    chunks.push_back(cuda->create_event(EventKind::ordering));
  }
  std::vector<bool> launched(request.schedule->routes.size());  // by chunk: some of it
  for (const auto& [dimension, at] : phases) {
    Request part = mesh_request.phase(at.chunk, at.phase);
    if (part.recv.empty()) continue;
    const auto chunk = static_cast<size_t>(at.chunk);
    Place& group = axis_groups[static_cast<size_t>(dimension)];
    try {
      launch_on(group, std::move(part), launched[chunk] ? chunks[chunk] : slot.begun,
                chunks[chunk]);
    } catch (const std::exception& error) {
      fault = phase_failure(at, topology.dimensions[static_cast<size_t>(dimension)], error.what());
      throw FaultError(fault);
    }
    launched[chunk] = true;
  }
  for (size_t chunk = 0; chunk < launched.size(); ++chunk) {
    if (launched[chunk]) cuda->wait(slot.stream, chunks[chunk]);
  }
}

void StreamMeshCommunicator::State::launch_on(Place& place, Request part, CudaEvent after,
                                              CudaEvent done) {
  part.window_bytes = 0;
  part.fence = false;
  part.order = StreamOrder{{after}, place.started, done};
  if (last && last != &place) part.order->after.push_back(last->started);
  std::exception_ptr failed;
  // A stream-ordered communicator has completed it when it returns.
  place.communicator->launch(part, [&failed](std::exception_ptr error) { failed = error; });
  if (failed) std::rethrow_exception(failed);
  last = &place;
}

/// With the lock.
const StreamMeshCommunicator::State::Phases& StreamMeshCommunicator::State::phases_of(
    const std::shared_ptr<const MeshSchedule>& schedule, int64_t bytes) {
  auto found = known.find(schedule.get());
  if (found == known.end() || found->second.schedule.expired()) {
    schedule->validate(topology);
    std::erase_if(known, [](const auto& entry) { return entry.second.schedule.expired(); });
    found = known.insert_or_assign(schedule.get(), Known{schedule, {}}).first;
  }
  std::map<int64_t, Phases>& of_bytes = found->second.phases;
  const auto made = of_bytes.find(bytes);
  if (made != of_bytes.end()) return made->second;
  return of_bytes[bytes] = launch_order(speeds, *schedule, static_cast<double>(bytes));
}

StreamMeshCommunicator::StreamMeshCommunicator(
    Topology topology, std::shared_ptr<Cuda> cuda, std::shared_ptr<Communicator> flat,
    std::vector<std::shared_ptr<Communicator>> axis_groups, int slots)
    : state_((check(topology, flat, axis_groups, slots),
              std::make_unique<State>(std::move(topology), std::move(cuda), std::move(flat),
                                      std::move(axis_groups), slots))) {}

StreamMeshCommunicator::~StreamMeshCommunicator() = default;

int StreamMeshCommunicator::rank() const { return state_->rank; }
int StreamMeshCommunicator::size() const { return state_->topology.ranks(); }
const Topology* StreamMeshCommunicator::topology() const { return &state_->topology; }

void StreamMeshCommunicator::launch(const Request& request, Completion done) {
  std::exception_ptr error;
  try {
    state_->enqueue(request);
  } catch (...) {
    error = std::current_exception();
  }
  done(std::move(error));
}

std::string StreamMeshCommunicator::failure() {
  std::string out;
  state_->with_all([&out](Communicator& communicator) {
    if (out.empty()) out = communicator.failure();
  });
  return out;
}

void StreamMeshCommunicator::abort() {
  std::vector<std::thread> threads;
  state_->with_all([&threads](Communicator& communicator) {
    threads.emplace_back([&communicator] { communicator.abort(); });
  });
  for (std::thread& thread : threads) thread.join();
}

void StreamMeshCommunicator::set_speeds(const Topology& measured) {
  measured.validate();
  bool same = measured.ndim() == state_->topology.ndim();
  for (size_t d = 0; same && d < measured.dimensions.size(); ++d) {
    same = measured.dimensions[d].size == state_->topology.dimensions[d].size;
  }
  if (!same) throw UsageError("speeds of a mesh of other sizes");
  std::lock_guard lock(state_->mutex);
  state_->speeds = measured;
  state_->known.clear();
}

}  // namespace usbyte
