#include "usbyte/mesh_communicator.h"

#include <mutex>
#include <string>
#include <utility>

#include "mesh_state.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

void check_fit(const Topology& topology, const std::shared_ptr<Communicator>& flat,
               const std::vector<std::shared_ptr<Communicator>>& lines) {
  topology.validate();
  const std::string mesh = "a mesh of " + std::to_string(topology.ranks()) + " ranks in " +
                           std::to_string(topology.ndim()) + " dimensions ";
  if (!flat) throw UsageError(mesh + "has no flat communicator");
  if (flat->size() != topology.ranks() || std::ssize(lines) != topology.ndim()) {
    throw UsageError(mesh + "got a flat communicator of " + std::to_string(flat->size()) +
                     " ranks and " + std::to_string(lines.size()) + " lines");
  }
  constexpr const char* kOnStreams =
      " is complete when it is on a stream, but phases must be over; use communicators of the host";
  if (flat->stream_ordered()) {
    throw UsageError(std::string("what the flat communicator does") + kOnStreams);
  }
  const std::vector<int> coordinates = topology.coordinates(flat->rank());
  for (size_t d = 0; d < lines.size(); ++d) {
    const Dimension& dimension = topology.dimensions[d];
    const std::string line = "the line of dimension '" + dimension.name + "'";
    const int ranks = lines[d] ? lines[d]->size() : 1, place = lines[d] ? lines[d]->rank() : 0;
    if (ranks != dimension.size || place != coordinates[d]) {
      throw UsageError(line + " has rank " + std::to_string(place) + " of " +
                       std::to_string(ranks) + ", not " + std::to_string(coordinates[d]) + " of " +
                       std::to_string(dimension.size));
    }
    if (lines[d] && lines[d]->stream_ordered()) {
      throw UsageError("what " + line + " does" + kOnStreams);
    }
  }
}

}  // namespace

MeshCommunicator::MeshCommunicator(Topology topology, std::shared_ptr<Communicator> flat,
                                   std::vector<std::shared_ptr<Communicator>> lines)
    : state_((check_fit(topology, flat, lines),
              std::make_shared<State>(std::move(topology), std::move(flat), std::move(lines)))) {}

MeshCommunicator::~MeshCommunicator() {
  State& s = *state_;
  s.end("the mesh communicator was destroyed before this request was complete");
  std::unique_lock lock(s.mutex);
  if (s.completing()) return;
  s.changed.wait(lock, [&s] { return s.idle(); });
}

int MeshCommunicator::rank() const { return state_->rank; }
int MeshCommunicator::size() const { return state_->topology.ranks(); }

// What is called may destroy this object.
void MeshCommunicator::launch(const Request& request, Completion done) {
  const std::shared_ptr<State> state = state_;
  if (!request.schedule && request.line < 0) return state->launch_flat(request, std::move(done));
  std::string why = mesh_problem(request, state->topology);
  if (why.empty() && request.schedule) why = state->invalid(request.schedule);
  if (!why.empty()) return done(std::make_exception_ptr(UsageError(why)));
  state->start(
      std::make_shared<MeshJob>(request, std::move(done), state->topology, state->coordinates));
}

const Topology* MeshCommunicator::topology() const { return &state_->topology; }

std::string MeshCommunicator::failure() { return state_->failure(); }

void MeshCommunicator::abort() {
  const std::shared_ptr<State> state = state_;
  state->end("the mesh communicator was aborted");
}

}  // namespace usbyte
