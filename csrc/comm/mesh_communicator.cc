// SPDX-License-Identifier: Apache-2.0
#include "mesh_communicator.h"

#include <string>
#include <utility>

#include "mesh_fit.h"
#include "mesh_state.h"
#include "usbyte/error.h"

namespace usbyte {
MeshCommunicator::MeshCommunicator(Topology topology, std::shared_ptr<Communicator> flat,
                                   std::vector<std::shared_ptr<Communicator>> axis_groups)
    : state_((
          check_mesh(topology, flat, axis_groups, false),
          std::make_shared<State>(std::move(topology), std::move(flat), std::move(axis_groups)))) {}

MeshCommunicator::~MeshCommunicator() {
  State& s = *state_;
  s.end("the mesh communicator was destroyed before this request was complete");
  MutexLock lock(s.mutex);
  if (s.completing()) return;
  while (!s.idle()) s.changed.wait(s.mutex);
}

int MeshCommunicator::rank() const { return state_->rank; }
int MeshCommunicator::size() const { return state_->topology.ranks(); }

// What is called may destroy this object.
void MeshCommunicator::launch(const Request& request, Completion done) {
  const std::shared_ptr<State> state = state_;
  if (!request.schedule && request.dimension < 0)
    return state->launch_flat(request, std::move(done));
  std::string why = mesh_problem(request, state->topology);
  if (why.empty() && request.order) {
    why =
        "a request with a schedule or a dimension would lose its order on a device; launch it "
        "without";
  }
  if (why.empty() && request.schedule) why = state->invalid(request.schedule);
  if (!why.empty()) return done(std::make_exception_ptr(UsageError(why)));
  state->start(
      std::make_shared<MeshRequest>(request, std::move(done), state->topology, state->coordinates));
}

const Topology* MeshCommunicator::topology() const { return &state_->topology; }

std::string MeshCommunicator::failure() { return state_->failure(); }

void MeshCommunicator::abort() {
  const std::shared_ptr<State> state = state_;
  state->end("the mesh communicator was aborted");
}

}  // namespace usbyte
