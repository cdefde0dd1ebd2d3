// SPDX-License-Identifier: Apache-2.0
#include "mesh_fit.h"

#include "usbyte/error.h"

namespace usbyte {

void check_mesh(const Topology& topology, const std::shared_ptr<Communicator>& flat,
                const std::vector<std::shared_ptr<Communicator>>& axis_groups, bool on_streams) {
  topology.validate();
  const std::string mesh = "a mesh of " + std::to_string(topology.ranks()) + " ranks in " +
                           std::to_string(topology.ndim()) + " dimensions ";
  if (!flat) throw UsageError(mesh + "has no flat communicator");
  if (flat->size() != topology.ranks() || std::ssize(axis_groups) != topology.ndim()) {
    throw UsageError(mesh + "got a flat communicator of " + std::to_string(flat->size()) +
                     " ranks and " + std::to_string(axis_groups.size()) + " axis groups");
  }
  const std::string misfit =
      on_streams
          ? " is complete when it is over, not when it is on a stream; use a MeshCommunicator"
          : " is complete when it is on a stream, but phases must be over; use communicators of "
            "the host, or a StreamMeshCommunicator";
  if (flat->stream_ordered() != on_streams) {
    throw UsageError("what the flat communicator does" + misfit);
  }
  const std::vector<int> coordinates = topology.coordinates(flat->rank());
  for (size_t d = 0; d < axis_groups.size(); ++d) {
    const Dimension& dimension = topology.dimensions[d];
    const std::string group = "the axis group of dimension '" + dimension.name + "'";
    const int ranks = axis_groups[d] ? axis_groups[d]->size() : 1,
              place = axis_groups[d] ? axis_groups[d]->rank() : 0;
    if (ranks != dimension.size || place != coordinates[d]) {
      throw UsageError(group + " has rank " + std::to_string(place) + " of " +
                       std::to_string(ranks) + ", not " + std::to_string(coordinates[d]) + " of " +
                       std::to_string(dimension.size));
    }
    if (axis_groups[d] && axis_groups[d]->stream_ordered() != on_streams) {
      throw UsageError("what " + group + " does" + misfit);
    }
  }
}

std::string phase_failure(const ChunkPhase& at, const Dimension& dimension,
                          const std::string& why) {
  return "phase " + std::to_string(at.phase) + " of chunk " + std::to_string(at.chunk) +
         ", over dimension '" + dimension.name + "', failed: " + why;
}

}  // namespace usbyte
