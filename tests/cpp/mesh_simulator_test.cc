// SPDX-License-Identifier: Apache-2.0
#include "simulator/mesh_simulator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "meshes.h"
#include "topology/themis.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr auto kDown = Collective::reduce_scatter;
constexpr auto kWhole = Collective::all_reduce;
constexpr MeshOptions kSmallest{MeshQueue::smallest_chunk_first};

// Each step takes 1 s, whatever is sent.
Topology one_dimension(double latency_s = 0) {
  return {{{"a", 2, 10, latency_s, DimensionKind::fully_connected}}};
}

MeshCollective reduce_scatter_of(double bytes, double release_s = 0) {
  return {kDown, bytes, {{0}}, {}, release_s, {}};
}

TEST(MeshSimulator, ByHand) {
  // Of 80 bytes in two chunks each phase takes 2 s: 20 bytes at 10/s, 10 bytes at 5/s.
  const Topology two{{{"a", 2, 10}, {"b", 2, 5}}};
  const MeshRun run = simulate_mesh(two, {{kWhole, 80, {{0, 1}, {0, 1}}, {}, 0, {}}});
  EXPECT_EQ(run.finish_s, 12);
  EXPECT_EQ(run.dimensions[0].busy_s, 8);
  EXPECT_EQ(run.dimensions[0].moved_bytes, 80);
  EXPECT_EQ(run.dimensions[1].moved_bytes, 40);
  EXPECT_DOUBLE_EQ(run.utilization, 120.0 / (12 * 15));
  using Order = std::vector<ChunkPhase>;
  EXPECT_EQ(run.dimensions[0].order, (Order{{0, 0, 0}, {0, 1, 0}, {0, 0, 3}, {0, 1, 3}}));
  // At 4 s both wait for b, and the earlier chunk goes first.
  EXPECT_EQ(run.dimensions[1].order, (Order{{0, 0, 1}, {0, 0, 2}, {0, 1, 1}, {0, 1, 2}}));
  // The other way round for one chunk: a has 2 + 1 + 1 + 2 s of work, b 2 + 4 + 4 + 2 s.
  const MeshRun mixed = simulate_mesh(two, {{kWhole, 80, {{0, 1}, {1, 0}}, {}, 0, {}}});
  EXPECT_EQ(mixed.dimensions[0].busy_s, 6);
  EXPECT_EQ(mixed.dimensions[1].busy_s, 12);
  EXPECT_EQ(mixed.finish_s, 12);
}

TEST(MeshSimulator, SmallestChunkFirst) {
  const std::vector<MeshCollective> three = {reduce_scatter_of(200), reduce_scatter_of(200, 1),
                                             reduce_scatter_of(20, 2)};
  EXPECT_EQ(simulate_mesh(one_dimension(), three).done_s, (std::vector<double>{10, 20, 21}));
  EXPECT_EQ(simulate_mesh(one_dimension(), three, kSmallest).done_s,
            (std::vector<double>{10, 21, 11}));
}

TEST(MeshSimulator, StartupsTakeTheirTurnOrOverlap) {
  const MeshCollective two_chunks{kDown, 40, {{0}, {0}}, {}, 0, {}};
  EXPECT_EQ(simulate_mesh(one_dimension(1), {two_chunks}).finish_s, 4);
  const MeshRun overlapped = simulate_mesh(one_dimension(1), {two_chunks}, {MeshQueue::fifo, true});
  EXPECT_EQ(overlapped.finish_s, 3);
  EXPECT_EQ(overlapped.dimensions[0].busy_s, 2);
  EXPECT_EQ(overlapped.dimensions[0].startup_s, 2);
}

TEST(MeshSimulator, CollectivesComeAfterOthers) {
  MeshCollective later = reduce_scatter_of(20, 1);
  later.after = {{0, 0.5}, {1, 0}};
  const MeshRun run =
      simulate_mesh(one_dimension(), {reduce_scatter_of(20), reduce_scatter_of(20, 4), later});
  EXPECT_EQ(run.released_s, (std::vector<double>{0, 4, 5}));
  EXPECT_EQ(run.done_s, (std::vector<double>{1, 5, 6}));
  later.after = {{0, 7}};
  EXPECT_EQ(simulate_mesh(one_dimension(), {reduce_scatter_of(20), later}).finish_s, 9);
  later.release_s = 20;
  EXPECT_EQ(simulate_mesh(one_dimension(), {reduce_scatter_of(20), later}).finish_s, 21);
}

TEST(MeshSimulator, OnlyDimensionsOfItsRanksCount) {
  const Topology two{{{"a", 4, 10}, {"b", 2, 5}}};
  const MeshCollective inner{kDown, 80, {{0}}, {4, 1}, 0, {}},
      outer{kDown, 80, {{1}}, {1, 2}, 0, {}};
  const MeshRun run = simulate_mesh(two, {inner, outer});
  EXPECT_EQ(run.done_s, (std::vector<double>{6, 8}));
  EXPECT_EQ(simulate_mesh(two, {{kDown, 80, {{0}}, {2, 1}, 0, {}}}).finish_s, 4);
  EXPECT_THROW(simulate_mesh(two, {{kDown, 80, {{0}}, {3, 1}, 0, {}}}), UsageError);
  EXPECT_THROW(run.schedule(inner), UsageError);
  // One rank has nothing to do, and does that at once.
  EXPECT_EQ(simulate_mesh({{{"a", 1}}}, {{kWhole, 80, {{}}, {}, 3, {}}}).finish_s, 3);
}

TEST(MeshSimulator, NothingIsLostAndNothingIsTooFast) {
  std::mt19937 rng(7);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const Topology topology = random_topology(rng, 1, 1, true);
    const auto kind =
        std::vector{kWhole, kDown, Collective::all_gather, Collective::all_to_all}[rng() % 4];
    MeshCollective collective{kind, 1e6, {}, {}, 0, {}};
    const size_t chunks = 1 + rng() % 20;
    for (size_t i = 0; i < chunks; ++i) {
      collective.routes.push_back(random_route(topology, rng));
    }
    const MeshOptions options{static_cast<MeshQueue>(rng() % 2), rng() % 2 == 0};
    const MeshRun run = simulate_mesh(topology, {collective}, options);
    std::vector<double> moved(topology.dimensions.size()), startup_s = moved;
    double critical_s = 0;
    for (const Route& route : collective.routes) {
      double path_s = 0;
      for (const MeshPhase& p :
           mesh_phases(topology, kind, route, 1e6 / static_cast<double>(chunks))) {
        moved[static_cast<size_t>(p.dimension)] += p.moved_bytes;
        startup_s[static_cast<size_t>(p.dimension)] += p.startup_s;
        path_s += p.seconds();
      }
      critical_s = std::max(critical_s, path_s);
    }
    const double least = 1 - 1e-9;
    EXPECT_GE(run.finish_s, least * critical_s);
    EXPECT_GE(run.finish_s, least * ideal_s(topology, kind, 1e6));
    for (size_t d = 0; d < moved.size(); ++d) {
      const DimensionUse& use = run.dimensions[d];
      EXPECT_NEAR(use.moved_bytes, moved[d], 1e-6);
      EXPECT_NEAR(use.busy_s, moved[d] / topology.dimensions[d].bytes_per_s, 1e-12);
      EXPECT_NEAR(use.startup_s, startup_s[d], 1e-12);
      EXPECT_GE(run.finish_s,
                least * (use.busy_s + (options.startups_overlap ? 0 : use.startup_s)));
    }
    EXPECT_LE(run.utilization, 1 + 1e-9);
    const MeshSchedule schedule = run.schedule(collective);
    schedule.validate(topology);
    EXPECT_EQ(MeshSchedule::from_json(schedule.to_json()), schedule);
    EXPECT_EQ(simulate_mesh(topology, {collective}, options).schedule(collective), schedule);
  }
}

TEST(MeshSimulator, CostDoesNotDependOnRanks) {
  const Topology huge{{{"a", 10, 4e11, 1e-7},
                       {"b", 100, 1e11, 1e-6, DimensionKind::switched},
                       {"c", 100, 5e10, 2e-6, DimensionKind::switched}}};
  ASSERT_EQ(huge.ranks(), 100'000);
  const auto begin = std::chrono::steady_clock::now();
  const MeshChoice choice = chosen_routes(huge, kWhole, 1e9, 64);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_GE(choice.seconds, choice.ideal_s);
}

TEST(MeshSimulator, IdealByHand) {
  const Topology two{{{"a", 4, 10}, {"b", 2, 5, 0, DimensionKind::switched, true}}};
  EXPECT_DOUBLE_EQ(ideal_s(two, kDown, 80), 80 * 7.0 / 8 / 15);
  EXPECT_DOUBLE_EQ(ideal_s(two, kWhole, 80), 2 * 80 * 7.0 / 8 / 15);
  EXPECT_DOUBLE_EQ(ideal_s(two, kDown, 80, {4, 1}), 6);
  EXPECT_DOUBLE_EQ(ideal_s(two, Collective::all_to_all, 80), 12);  // a is a ring, and passes on
  EXPECT_DOUBLE_EQ(ideal_s(two, Collective::all_to_all, 80, {1, 2}), 8);
  EXPECT_EQ(ideal_s({{{"a", 1}}}, kWhole, 80), 0);
}

TEST(MeshSimulator, RejectsWhatItCannotCarryOut) {
  const auto run = [](const MeshCollective& c) { simulate_mesh(one_dimension(), {c}); };
  for (double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(run({kDown, wrong, {{0}}, {}, 0, {}}), UsageError);
    EXPECT_THROW(run({kDown, 1, {{0}}, {}, wrong, {}}), UsageError);
    EXPECT_THROW(simulate_mesh(one_dimension(),
                               {reduce_scatter_of(1), {kDown, 1, {{0}}, {}, 0, {{0, wrong}}}}),
                 UsageError);
  }
  EXPECT_THROW(run({kDown, 1, {}, {}, 0, {}}), UsageError);
  EXPECT_THROW(run({kDown, 1, {{1}}, {}, 0, {}}), UsageError);
  EXPECT_THROW(run({Collective::barrier, 1, {{0}}, {}, 0, {}}), UsageError);
  for (int self_or_later : {-1, 0, 1}) {
    EXPECT_THROW(run({kDown, 1, {{0}}, {}, 0, {{self_or_later, 0}}}), UsageError);
  }
}

TEST(MeshSchedule, RejectsOrdersThatWaitInACircle) {
  const Topology two{{{"a", 2, 10}, {"b", 2, 5}}};
  const MeshCollective collective{kDown, 80, {{0, 1}, {1, 0}}, {}, 0, {}};
  const MeshSchedule good = simulate_mesh(two, {collective}).schedule(collective);
  good.validate(two);
  EXPECT_THROW((MeshSchedule{kDown, {}, {{}, {}}}.validate(two)), UsageError);
  for (const char* wrong : {"4294967296", "-1", "0.9", "true", "1e300", "[0]"}) {
    std::string json = good.to_json();
    json.replace(json.find("[[0,1]") + 2, 1, wrong);
    EXPECT_THROW(MeshSchedule::from_json(json), UsageError) << json;
  }
  MeshSchedule circle = good;
  for (auto& order : circle.order) std::swap(order[0], order[1]);
  EXPECT_THROW(circle.validate(two), UsageError);
  MeshSchedule twice = good, missing = good, elsewhere = good, unknown = good, fewer = good;
  twice.order[0][1] = twice.order[0][0];
  EXPECT_THROW(twice.validate(two), UsageError);
  missing.order[1].pop_back();
  EXPECT_THROW(missing.validate(two), UsageError);
  std::swap(elsewhere.order[0], elsewhere.order[1]);
  EXPECT_THROW(elsewhere.validate(two), UsageError);
  unknown.order[0][0].chunk = 2;
  EXPECT_THROW(unknown.validate(two), UsageError);
  fewer.order.pop_back();
  EXPECT_THROW(fewer.validate(two), UsageError);
  for (const char* json : {"", "[]", R"({"format": "usbyte-mesh-schedule-1"})",
                           R"({"format": "usbyte-mesh-schedule-1", "kind": "gossip",
                               "routes": [], "order": []})",
                           R"({"format": "usbyte-mesh-schedule-1", "kind": "all_reduce",
                               "routes": [[0]], "order": [[[0]]]})"}) {
    EXPECT_THROW(MeshSchedule::from_json(json), UsageError) << json;
  }
}

TEST(MeshSchedule, ChangedBytesAreRejectedOrStillCarriedOut) {
  std::mt19937 rng(8);
  const std::string alphabet = "{}[],:\"0123456789.-e ";
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const Topology topology = random_topology(rng, 2, 2);
    const MeshCollective collective{kDown, 80, themis_routes(topology, kDown, 80, 3), {}, 0, {}};
    const MeshSchedule schedule = simulate_mesh(topology, {collective}).schedule(collective);
    std::string json = schedule.to_json();
    json[rng() % json.size()] = alphabet[rng() % alphabet.size()];
    try {
      const MeshSchedule changed = MeshSchedule::from_json(json);
      changed.validate(topology);
      EXPECT_EQ(changed.routes.size(), 3u);
    } catch (const UsageError&) {
      continue;
    }
  }
}

}  // namespace
}  // namespace usbyte
