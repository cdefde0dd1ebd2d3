// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/tensor.h"

namespace usbyte {

/// How the ranks of one axis group are joined.
enum class DimensionKind : uint8_t { ring, fully_connected, switched };

std::string_view name(DimensionKind kind);
/// Inverse of `name`; throws UsageError on an unknown spelling.
DimensionKind dimension_kind_from_name(std::string_view name);

/// One dimension of a network: the links among ranks that differ in one coordinate only.
struct Dimension {
  std::string name;
  int size = 1;            ///< ranks of an axis group
  double bytes_per_s = 1;  ///< that a rank can send, and at the same time receive
  double latency_s = 0;    ///< of one step
  DimensionKind kind = DimensionKind::ring;
  /// The switch adds up and copies, as SHARP does (Graham et al., COMHPC 2016) and FRED would
  /// (Rashidi et al., arXiv 2406.19580): a rank sends a vector once and receives the sum once.
  bool in_network_reduction = false;

  /// Messages one after another of a reduce_scatter, all_gather or all_to_all: around a ring
  /// size - 1; to all others at once where all are connected, 1; behind a switch ceil(log2 size),
  /// by halving and doubling (Thakur, Rabenseifner and Gropp, 2005), and 1 if it adds up itself.
  int steps() const;
  /// steps() * latency_s: what a phase takes besides its bytes.
  double startup_s() const { return steps() * latency_s; }
  /// Bytes that a rank sends, and receives, in a phase of `kind` whose vector, before a
  /// reduce_scatter or after an all_gather, has `bytes`: bytes * (size - 1) / size, which is the
  /// least (Chan, Heimlich, Purkayastha and van de Geijn, 2007). As phases of one all_reduce
  /// (`of_all_reduce`), behind a switch that adds up, half of `bytes` for each: a rank sends the
  /// others' parts, then its own once, and receives likewise, so that those of two chunks overlap.
  double moved_bytes(double bytes, bool of_all_reduce) const;
  /// Bytes that a rank sends, and receives, in an all_to_all of `bytes` for each rank:
  /// bytes * (size - 1) / size where all others are reached directly. A ring has links to the next
  /// rank only, so that what goes to the k-th one is sent k times, by those in between too:
  /// bytes / size * (1 + 2 + ... + size - 1) = bytes * (size - 1) / 2. Where bytes_per_s are those
  /// of both directions of a ring, each carries half of them, all the way round as well.
  double exchanged_bytes(double bytes) const;

  bool operator==(const Dimension&) const = default;
};

/// Order of dimensions: that of a chunk's reduce_scatter phases, which its all_gather phases walk
/// backwards. Dimensions of one rank are left out, and so are those that a collective does not
/// span.
using Route = std::vector<int>;

/// A network of several dimensions, the innermost first: rank = c0 + c1 * P0 + c2 * P0 * P1 + ...
struct Topology {
  std::vector<Dimension> dimensions;

  int ndim() const { return static_cast<int>(dimensions.size()); }
  int ranks() const;
  /// Sum of bytes_per_s of those with more than one rank.
  double bytes_per_s() const;
  /// Throws UsageError on a rank out of range.
  std::vector<int> coordinates(int rank) const;
  /// Inverse of `coordinates`; throws UsageError on coordinates out of range.
  int rank(const std::vector<int>& coordinates) const;
  /// Ranks that differ from `rank` in the coordinate of `dimension` only, by that coordinate;
  /// `rank` itself is among them.
  std::vector<int> axis_group(int rank, int dimension) const;
  /// The same network as a collective among `sizes[d]` ranks of each axis group sees it. Empty:
  /// all. Throws UsageError on another number of sizes, or sizes that do not divide an axis group.
  Topology among(const std::vector<int>& sizes) const;

  /// Throws UsageError unless there are dimensions of different names, sizes are positive and their
  /// product fits an int, speeds are positive and finite, latencies not negative and finite, and
  /// only switches add up.
  void validate() const;
  /// Canonical: equal topologies have equal text.
  std::string to_json() const;
  /// Throws UsageError on anything but a valid topology of known fields.
  static Topology from_json(std::string_view json);
  bool operator==(const Topology&) const = default;
};

/// One phase of a chunk.
struct MeshPhase {
  int dimension = 0;
  Collective kind = Collective::reduce_scatter;  ///< or all_gather or all_to_all
  double bytes = 0;        ///< of the vector before a reduce_scatter or after an all_gather
  double moved_bytes = 0;  ///< that a rank sends
  double startup_s = 0;
  double transfer_s = 0;  ///< moved_bytes over the dimension's speed

  double seconds() const { return startup_s + transfer_s; }
  bool operator==(const MeshPhase&) const = default;
};

/// Phases of a chunk of `bytes` on its way: reduce_scatter in the order of the route, all_gather
/// backwards, all_reduce both. `bytes` are of the vector that is whole somewhere: before a
/// reduce_scatter, after an all_gather; each dimension that has been walked leaves 1 / size of it.
/// An all_to_all keeps all bytes in every dimension, and passes them on around rings. Throws
/// UsageError on other collectives and on routes that are no order of the dimensions with more than
/// one rank.
std::vector<MeshPhase> mesh_phases(const Topology& topology, Collective kind, const Route& route,
                                   double bytes);

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
