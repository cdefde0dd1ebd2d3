#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "usbyte/collective.h"
#include "usbyte/topology.h"

namespace usbyte {

/// A phase of a chunk of a collective; phases are counted as mesh_phases lists them.
struct ChunkPhase {
  int collective = 0;
  int chunk = 0;
  int phase = 0;

  auto operator<=>(const ChunkPhase&) const = default;
};

/// Phases that a dimension has in hand at once: the next one starts up while one is on its way.
inline constexpr int kPhasesInFlight = 2;

/// What all ranks carry out: ways of chunks, and in which order each dimension takes them. A rank
/// that follows the orders never waits in a circle: the simulator has carried them out.
struct MeshSchedule {
  Collective kind = Collective::all_reduce;
  std::vector<Route> routes;                   ///< by chunk
  std::vector<std::vector<ChunkPhase>> order;  ///< by dimension; of collective 0 only

  /// Throws UsageError unless every phase of every chunk is once in the order of its dimension and
  /// nothing waits in a circle.
  void validate(const Topology& topology) const;
  std::string to_json() const;
  /// Throws UsageError on malformed JSON. What it says is not checked before `validate`.
  static MeshSchedule from_json(std::string_view json);
  bool operator==(const MeshSchedule&) const = default;
};

}  // namespace usbyte
