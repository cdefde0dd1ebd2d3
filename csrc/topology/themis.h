// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "simulator/mesh_simulator.h"
#include "usbyte/topology.h"

namespace usbyte {

/// What startups count in Themis' loads.
enum class ThemisLatency : uint8_t {
  each_phase,  ///< with every chunk: a dimension carries out one operation at a time
  once,        ///< once in each dimension: startups overlap
  none         ///< nothing, as in the code that its authors have released
};

std::string_view name(ThemisLatency latency);  ///< "each_phase", "once" or "original"
/// Inverse of `name`; throws UsageError on an unknown spelling.
ThemisLatency themis_latency_from_name(std::string_view name);

struct ThemisOptions {
  ThemisLatency latency = ThemisLatency::each_phase;
  /// A chunk takes the fixed way unless loads differ by what a chunk this many times smaller takes
  /// on the least loaded dimension.
  double threshold_divisor = 16;
};

/// Innermost first for all chunks: what hierarchical collectives do.
std::vector<Route> fixed_routes(const Topology& topology, int chunks);

/// Themis (Rashidi, Won, Srinivasan, Sridharan and Krishna, ISCA 2022, arXiv 2110.04478), chunk by
/// chunk: the dimensions by their load so far, the least loaded first, since the first phase moves
/// most; the innermost first among equals, and the fixed way where loads are nearly equal. An
/// all_gather walks the route backwards, so that its last and largest phase is where the load is
/// least. Loads count the reduce_scatter phases, which the all_gather phases mirror. Routes of an
/// all_to_all are fixed: its order changes no load.
std::vector<Route> themis_routes(const Topology& topology, Collective kind, double bytes,
                                 int chunks, const ThemisOptions& options = {});

/// Seconds that routes load each dimension with, counted as themis_routes does.
std::vector<double> route_loads_s(const Topology& topology, Collective kind, double bytes,
                                  const std::vector<Route>& routes,
                                  const ThemisOptions& options = {});

/// Of two dimensions, without startups.
struct TwoDimensionShare {
  /// Share of the bytes that goes through the inner dimension first so that both end together,
  /// within [0, 1].
  double inner_first = 1;
  /// Whether any share beats inner first alone: B1 / B2 < (P1 - 1) P2 / (P2 - 1).
  bool gains = false;
  double gain = 1;  ///< time of inner first alone over that of the best share
};

/// With a_i = (P_i - 1) / P_i, a share x that goes inner first loads the inner dimension with
/// x a1 / B1 + (1 - x) a1 / (P2 B1) and the outer one with x a2 / (P1 B2) + (1 - x) a2 / B2 for
/// each byte. They are equal at x* = (a2/B2 - a1/(P2 B1)) / ((a1/B1) (1 - 1/P2) + (a2/B2) (1 -
/// 1/P1)), and x = 1 is best where the outer dimension is the busier one even then. Where a
/// switch adds up, a_i is 1 / 2. Throws UsageError unless the topology has two dimensions of more
/// than one rank.
TwoDimensionShare two_dimension_share(const Topology& topology);

/// A way to carry out a collective, and what it is predicted to take.
struct MeshChoice {
  std::string name;  ///< "fixed", "themis+fifo" or "themis+scf"
  MeshSchedule schedule;
  double seconds = 0;
  double fixed_s = 0;  ///< of the fixed order
  double ideal_s = 0;
};

/// The fixed order, Themis with first come, first served, and Themis with the smallest chunk first,
/// each as the simulator says that dimensions take the chunks. `options.queue` is not used.
std::vector<MeshChoice> route_choices(const Topology& topology, Collective kind, double bytes,
                                      int chunks, const ThemisOptions& options = {},
                                      const MeshOptions& mesh = {});

/// The fastest of them, in the simulator; the fixed order if that is as fast. So nothing is lost
/// where nothing can be gained. Deterministic: all ranks choose alike. `options.queue` is not used.
MeshChoice chosen_routes(const Topology& topology, Collective kind, double bytes, int chunks,
                         const ThemisOptions& options = {}, const MeshOptions& mesh = {});

}  // namespace usbyte
