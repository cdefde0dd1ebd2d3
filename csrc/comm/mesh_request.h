// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "usbyte/communicator.h"
#include "usbyte/topology.h"

namespace usbyte {

/// What keeps a request with a schedule or a dimension from being carried out, but for what
/// `validate` says of the schedule; empty if nothing does.
std::string mesh_problem(const Request& request, const Topology& topology);

/// A request with a schedule, or with a dimension, as its only phase, on its way: what this rank
/// does of each phase, and how far it is.
class MeshRequest {
 public:
  /// `coordinates` are this rank's. The schedule is valid for the topology.
  MeshRequest(const Request& request, Completion done, const Topology& topology,
              const std::vector<int>& coordinates);

  /// Of its phases on the axis group of a dimension.
  const std::vector<ChunkPhase>& order(size_t dimension) const;
  /// What an axis group's communicator is to do. Without spans where it has nothing to do: on all
  /// ranks of the axis group, as these agree on the coordinates that the spans depend on.
  Request phase(int chunk, int phase) const;

  Completion done;          // called, and with it released, by whom has taken this out of the State
  std::vector<int> passed;  // phases, by chunk
  int64_t left = 0;         // phases
  int in_flight = 0;        // phases

 private:
  const Request request_;
  /// By chunk and by dimensions that have been walked: what is this rank's then.
  std::vector<std::vector<std::vector<BufferView>>> spans_;
};

}  // namespace usbyte
