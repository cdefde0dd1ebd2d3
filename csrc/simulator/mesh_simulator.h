// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/topology.h"

namespace usbyte {

/// What a dimension takes next of the chunks that wait for it: the one that came first, or the one
/// with the fewest bytes to move (smallest chunk first, Themis). Ties go to the chunk that came
/// first, then to the earlier collective, the earlier chunk.
enum class MeshQueue : uint8_t { fifo, smallest_chunk_first };

std::string_view name(MeshQueue queue);  ///< "fifo" or "scf"
/// Inverse of `name`; throws UsageError on an unknown spelling.
MeshQueue mesh_queue_from_name(std::string_view name);

/// Rules of all dimensions.
struct MeshOptions {
  MeshQueue queue = MeshQueue::fifo;
  /// A dimension takes the next chunk when the bytes of the one before have been sent, and not only
  /// when that has arrived: startups are latency, during which others send. Else it is busy with
  /// one operation at a time, startup included, as one communicator is.
  bool startups_overlap = false;
};

/// So long after the end of an earlier collective, s: computing in between, for one.
struct MeshDependency {
  int collective = 0;  ///< by its place in the run
  double delay_s = 0;

  bool operator==(const MeshDependency&) const = default;
};

/// A collective among all ranks, or among `sizes[d]` of each axis group of dimension d. It is cut
/// into as many equal chunks as it has routes, which may start release_s after the start of the
/// run, and not before what it comes `after`.
struct MeshCollective {
  Collective kind = Collective::all_reduce;  ///< or reduce_scatter, all_gather, all_to_all
  double bytes = 0;           ///< before a reduce_scatter, after an all_gather; see mesh_phases
  std::vector<Route> routes;  ///< by chunk
  std::vector<int> sizes;     ///< empty: all ranks
  double release_s = 0;
  std::vector<MeshDependency> after;
};

/// What happened to one dimension.
struct DimensionUse {
  double busy_s = 0;       ///< while bytes were sent: moved_bytes over its speed
  double startup_s = 0;    ///< of its phases together
  double moved_bytes = 0;  ///< that each rank sent
  std::vector<ChunkPhase> order;
};

/// A run of collectives.
struct MeshRun {
  double finish_s = 0;
  std::vector<double> released_s;  ///< by collective
  std::vector<double> done_s;      ///< by collective
  std::vector<DimensionUse> dimensions;
  /// Bytes that all dimensions moved over what they could have moved until the end: utilisations of
  /// the dimensions, weighted by their speeds, as Themis defines it.
  double utilization = 0;

  /// What ranks carry out of a run of one collective. Throws UsageError if there were others.
  MeshSchedule schedule(const MeshCollective& collective) const;
};

/// All ranks do the same at the same time, so that a dimension is one server with a queue and the
/// cost does not depend on the number of ranks: O(n log n) for n phases of chunks. The same on all
/// ranks for the same arguments. Throws UsageError on an invalid topology or collective.
MeshRun simulate_mesh(const Topology& topology, const std::vector<MeshCollective>& collectives,
                      const MeshOptions& options = {});

/// Seconds that a schedule takes, carried out as `MeshCommunicator` does, for `bytes` in as many
/// chunks as it has routes: a dimension has up to `in_flight` phases in hand, whose startups pass
/// side by side and whose bytes share it. Throws UsageError unless it is a schedule for the
/// topology.
double simulate_schedule(const Topology& topology, const MeshSchedule& schedule, double bytes,
                         int in_flight = kPhasesInFlight);

/// A phase, and the dimension that it is over.
struct LinePhase {
  int dimension = 0;
  ChunkPhase at;

  auto operator<=>(const LinePhase&) const = default;
};

/// The order in which `simulate_schedule` takes phases up, for who launches all of them ahead of
/// time: it keeps the order of each dimension and of each chunk. Throws UsageError likewise.
std::vector<LinePhase> launch_order(const Topology& topology, const MeshSchedule& schedule,
                                    double bytes, int in_flight = kPhasesInFlight);

/// Seconds of a collective if all dimensions that it spans were busy all the time and startups
/// took none: bytes_moved / sum of speeds. Every route moves the same, B (1 - 1/N) of B bytes for
/// each of reduce_scatter and all_gather among N ranks; behind a switch that adds up, P ranks move
/// 2 (P - 1) / P times less for an all_reduce. An all_to_all takes as long as its slowest
/// dimension, where rings pass messages on.
double ideal_s(const Topology& topology, Collective kind, double bytes,
               const std::vector<int>& sizes = {});

}  // namespace usbyte
