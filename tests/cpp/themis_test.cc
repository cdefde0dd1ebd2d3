// SPDX-License-Identifier: Apache-2.0
#include "topology/themis.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "meshes.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr auto kWhole = Collective::all_reduce;
constexpr std::array kReducing = {Collective::all_reduce, Collective::reduce_scatter,
                                  Collective::all_gather};
constexpr std::array kLatencies = {ThemisLatency::each_phase, ThemisLatency::once,
                                   ThemisLatency::none};

Route innermost_first(const Topology& topology) { return fixed_routes(topology, 1).front(); }

// Loads anew from the phases themselves.
std::vector<double> recomputed(const Topology& topology, Collective kind, double chunk_bytes,
                               std::span<const Route> routes, ThemisLatency latency) {
  std::vector<double> out;
  for (const Dimension& d : topology.dimensions) {
    out.push_back(latency == ThemisLatency::once ? d.startup_s() : 0);
  }
  for (const Route& route : routes) {
    for (const MeshPhase& p : mesh_phases(topology, kind, route, chunk_bytes)) {
      if (kind == kWhole && p.kind == Collective::all_gather) continue;
      out[static_cast<size_t>(p.dimension)] +=
          p.transfer_s + (latency == ThemisLatency::each_phase ? p.startup_s : 0);
    }
  }
  return out;
}

TEST(Themis, EveryChunkGoesToTheLeastLoadedFirst) {
  std::mt19937 rng(11);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const Topology topology = random_topology(rng, 1, 1, true);
    const Collective kind = kReducing[rng() % 3];
    const ThemisOptions options{kLatencies[rng() % 3]};
    const int chunks = 1 + static_cast<int>(rng() % 64);
    const double bytes = 1e6 * static_cast<double>(1 + rng() % 100), chunk_bytes = bytes / chunks;
    const std::vector<Route> routes = themis_routes(topology, kind, bytes, chunks, options);
    ASSERT_EQ(std::ssize(routes), chunks);
    EXPECT_EQ(routes, themis_routes(topology, kind, bytes, chunks, options));
    const Route fixed = innermost_first(topology);
    for (size_t i = 0; i < routes.size(); ++i) {
      Route sorted = routes[i];
      std::ranges::sort(sorted);
      ASSERT_EQ(sorted, fixed);
      if (fixed.size() < 2) continue;
      const auto loads =
          recomputed(topology, kind, chunk_bytes, std::span(routes).first(i), options.latency);
      const auto load = [&](int d) { return loads[static_cast<size_t>(d)]; };
      Route expected = fixed;
      std::ranges::stable_sort(expected, {}, load);
      const Dimension& least = topology.dimensions[static_cast<size_t>(expected.front())];
      const double worth_s =
          least.moved_bytes(chunk_bytes / 16, kind == kWhole) / least.bytes_per_s +
          (options.latency == ThemisLatency::each_phase ? least.startup_s() : 0);
      const double difference_s = load(expected.back()) - load(expected.front());
      // Sums in another order may decide another way where there is nothing between them.
      if (std::abs(difference_s - worth_s) < 1e-12) continue;
      if (difference_s < worth_s) expected = fixed;
      for (size_t k = 0; k < expected.size(); ++k) {
        EXPECT_NEAR(load(routes[i][k]), load(expected[k]), 1e-12);
      }
    }
    const auto loads = route_loads_s(topology, kind, bytes, routes, options);
    const auto again = recomputed(topology, kind, chunk_bytes, routes, options.latency);
    for (size_t d = 0; d < loads.size(); ++d) {
      EXPECT_NEAR(loads[d], again[d], 1e-9 * (1 + again[d]));
    }
  }
}

TEST(Themis, ByHand) {
  // Chunks of 32 bytes that go inner first load a and b with 1.6 s each, so that the fixed order
  // is never left. Where b is four times as fast they load it with 0.4 s, and go there first: then
  // both are loaded with 0.8 s.
  const Topology equal{{{"a", 2, 10}, {"b", 2, 5}}};
  EXPECT_EQ(themis_routes(equal, kWhole, 128, 4), fixed_routes(equal, 4));
  const Topology uneven{{{"a", 2, 10}, {"b", 2, 20}}};
  const std::vector<Route> routes = themis_routes(uneven, kWhole, 128, 4);
  EXPECT_EQ(routes, (std::vector<Route>{{0, 1}, {1, 0}, {1, 0}, {1, 0}}));
  const std::vector<double> loads = route_loads_s(uneven, kWhole, 128, routes);
  EXPECT_DOUBLE_EQ(loads[0], 4);
  EXPECT_DOUBLE_EQ(loads[1], 2.8);
  EXPECT_EQ(themis_routes(uneven, Collective::all_to_all, 128, 4), fixed_routes(uneven, 4));
}

TEST(Themis, CountsStartupsOrNot) {
  // Startups are all that takes time: b's chunks take 10 s, a's 1 s. Without them b looks faster.
  const Topology topology{{{"a", 2, 1e9, 1}, {"b", 2, 4e9, 10}}};
  const auto outer_first = [&](ThemisLatency latency) {
    return std::ranges::count(themis_routes(topology, kWhole, 1000, 8, {latency}), Route{1, 0});
  };
  EXPECT_EQ(outer_first(ThemisLatency::each_phase), 0);
  EXPECT_EQ(outer_first(ThemisLatency::once), 0);
  EXPECT_GE(outer_first(ThemisLatency::none), 4);
  for (ThemisLatency latency : kLatencies) {
    EXPECT_EQ(themis_latency_from_name(name(latency)), latency);
  }
  EXPECT_THROW(themis_latency_from_name("twice"), UsageError);
}

// All routes that there are, given to chunks in all ways.
std::vector<std::vector<Route>> all_assignments(const Topology& topology, int chunks) {
  std::vector<Route> routes;
  Route route = innermost_first(topology);
  do routes.push_back(route);
  while (std::ranges::next_permutation(route).found);
  std::vector<std::vector<Route>> out(1);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    std::vector<std::vector<Route>> longer;
    for (const auto& assigned : out) {
      for (const Route& next : routes) {
        longer.push_back(assigned);
        longer.back().push_back(next);
      }
    }
    out = std::move(longer);
  }
  return out;
}

// In the better of both queues.
double routed_s(const Topology& topology, double bytes, const std::vector<Route>& routes) {
  double best = std::numeric_limits<double>::infinity();
  for (MeshQueue queue : {MeshQueue::fifo, MeshQueue::smallest_chunk_first}) {
    const MeshCollective collective{kWhole, bytes, routes, {}, 0, {}};
    best = std::min(best, simulate_mesh(topology, {collective}, {queue}).finish_s);
  }
  return best;
}

// Against all assignments. The first chunk always goes the fixed way, so that one or two chunks can
// take several times as long as they would at best. But the busiest dimension is loaded with no
// more than at best and one phase of a chunk, on the dimension that is slowest for it; and times,
// which have all_gathers and waits too, are within three of those.
TEST(Themis, LoadsAreWithinAChunkOfTheBestOfAllAssignments) {
  std::mt19937 rng(13);
  constexpr double kBytes = 1e8;
  for (const auto& [ndim, most_chunks] : {std::pair(2, 6), {3, 4}}) {
    for (int chunks = 1; chunks <= most_chunks; ++chunks) {
      SCOPED_TRACE(std::to_string(ndim) + " dimensions, " + std::to_string(chunks) + " chunks");
      double sum = 0;
      constexpr int kRepeats = 50;
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        Topology topology = random_topology(rng, 3, 2, true);
        topology.dimensions.resize(static_cast<size_t>(ndim));
        double slowest_s = 0;
        for (const Dimension& d : topology.dimensions) {
          const double moved = d.moved_bytes(kBytes / chunks, true);
          slowest_s = std::max(slowest_s, d.startup_s() + moved / d.bytes_per_s);
        }
        const auto busiest_s = [&](const std::vector<Route>& routes) {
          return std::ranges::max(route_loads_s(topology, kWhole, kBytes, routes));
        };
        double best_s = std::numeric_limits<double>::infinity(), least_load_s = best_s;
        for (const std::vector<Route>& routes : all_assignments(topology, chunks)) {
          best_s = std::min(best_s, routed_s(topology, kBytes, routes));
          least_load_s = std::min(least_load_s, busiest_s(routes));
        }
        const std::vector<Route> greedy = themis_routes(topology, kWhole, kBytes, chunks);
        const double greedy_s = routed_s(topology, kBytes, greedy), load_s = busiest_s(greedy);
        const double chosen_s = chosen_routes(topology, kWhole, kBytes, chunks).seconds;
        EXPECT_GE(load_s, least_load_s * (1 - 1e-9));
        EXPECT_GE(chosen_s, best_s * (1 - 1e-9));
        EXPECT_LE(chosen_s, greedy_s * (1 + 1e-9));
        EXPECT_LE(load_s, least_load_s + slowest_s);
        EXPECT_LE(greedy_s, best_s + 3 * slowest_s);
        sum += chosen_s / best_s;
      }
      EXPECT_LT(sum / kRepeats, chunks < 3 ? 2 : 1.6);
    }
  }
}

TEST(Themis, ChosenIsNeverSlowerThanTheFixedOrder) {
  std::mt19937 rng(17);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const Topology topology = random_topology(rng, 1, 1, true);
    const Collective kind = kReducing[rng() % 3];
    const int chunks = 1 + static_cast<int>(rng() % 32);
    const double bytes = 1e4 * std::pow(10, rng() % 5);
    const ThemisOptions options{kLatencies[rng() % 3]};
    const MeshOptions mesh{MeshQueue::fifo, rng() % 2 == 0};
    const MeshChoice choice = chosen_routes(topology, kind, bytes, chunks, options, mesh);
    const MeshCollective fixed{kind, bytes, fixed_routes(topology, chunks), {}, 0, {}};
    EXPECT_EQ(choice.fixed_s, simulate_mesh(topology, {fixed}, mesh).finish_s);
    EXPECT_LE(choice.seconds, choice.fixed_s);
    EXPECT_EQ(choice.name == "fixed", choice.seconds == choice.fixed_s);
    EXPECT_EQ(choice.schedule,
              chosen_routes(topology, kind, bytes, chunks, options, mesh).schedule);
    choice.schedule.validate(topology);
  }
}

Topology node_and_network(double inner_gb, double outer_gb, int inner, int outer) {
  return {{{"node", inner, 1e9 * inner_gb}, {"network", outer, 1e9 * outer_gb}}};
}

TEST(TwoDimensionShare, TellsWhereNothingIsGained) {
  // NVLink and NICs: the outer dimension is the busier one whatever goes inner first.
  for (int nodes : {2, 4, 8, 64}) {
    const Topology nvlink = node_and_network(450, 50, 8, nodes);
    const TwoDimensionShare share = two_dimension_share(nvlink);
    EXPECT_EQ(share.gains, 9 < 7.0 * nodes / (nodes - 1)) << nodes;
    EXPECT_FALSE(share.gains && share.gain == 1);
    if (share.gains) continue;
    EXPECT_EQ(share.inner_first, 1);
    EXPECT_EQ(share.gain, 1);
    const MeshChoice choice = chosen_routes(nvlink, kWhole, 1e9, 64);
    EXPECT_EQ(choice.name, "fixed");
  }
  const TwoDimensionShare pcie = two_dimension_share(node_and_network(20, 25, 8, 8));
  EXPECT_TRUE(pcie.gains);
  EXPECT_GT(pcie.gain, 1.45);
}

TEST(TwoDimensionShare, IsTheBestOfAllShares) {
  std::mt19937 rng(19);
  for (int repeat = 0; repeat < 100; ++repeat) {
    Topology topology = random_topology(rng, 2, 2);
    topology.dimensions.resize(2);
    for (Dimension& d : topology.dimensions) d.latency_s = 0;
    topology.dimensions[1].kind = DimensionKind::switched;
    topology.dimensions[1].in_network_reduction = rng() % 2 == 0;
    const auto busiest_s = [&](double x) {
      double a = 0, b = 0;
      for (const auto& [route, part] : {std::pair(Route{0, 1}, x), {Route{1, 0}, 1 - x}}) {
        const auto loads = route_loads_s(topology, kWhole, 1e9 * part, {route});
        a += loads[0];
        b += loads[1];
      }
      return std::max(a, b);
    };
    const TwoDimensionShare share = two_dimension_share(topology);
    const double best = busiest_s(share.inner_first);
    for (int i = 0; i <= 50; ++i) EXPECT_GE(busiest_s(i / 50.0), best * (1 - 1e-9));
    EXPECT_NEAR(share.gain, busiest_s(1) / best, 1e-9);
    EXPECT_EQ(share.gains, share.gain > 1 + 1e-12) << topology.to_json();
    // With many chunks the greedy rule loads no more than the fixed order does.
    if (!topology.dimensions[1].in_network_reduction) {
      const auto loads =
          route_loads_s(topology, kWhole, 1e9, themis_routes(topology, kWhole, 1e9, 1000));
      EXPECT_LT(std::ranges::max(loads), busiest_s(1) * 1.01 + best * 0.01);
    }
  }
  EXPECT_THROW(two_dimension_share({{{"a", 2}}}), UsageError);
  EXPECT_THROW(two_dimension_share({{{"a", 2}, {"b", 2}, {"c", 2}}}), UsageError);
}

TEST(Themis, RejectsWhatHasNoRoutes) {
  const Topology topology{{{"a", 2}, {"b", 2}}};
  EXPECT_THROW(themis_routes(topology, Collective::broadcast, 1, 1), UsageError);
  EXPECT_THROW(themis_routes(topology, kWhole, 1, 0), UsageError);
  EXPECT_THROW(themis_routes(topology, kWhole, -1, 1), UsageError);
  EXPECT_THROW(themis_routes(topology, kWhole, std::nan(""), 1), UsageError);
  EXPECT_THROW(themis_routes(topology, kWhole, 1, 1, {ThemisLatency::once, 0}), UsageError);
  EXPECT_THROW(fixed_routes(topology, -1), UsageError);
  EXPECT_THROW(fixed_routes({}, 1), UsageError);
  EXPECT_THROW(route_loads_s(topology, kWhole, 1, {{0}}), UsageError);
  EXPECT_THROW(route_loads_s(topology, Collective::all_to_all, 1, {{0, 1}}), UsageError);
}

}  // namespace
}  // namespace usbyte
