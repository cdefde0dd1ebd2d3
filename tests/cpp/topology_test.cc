// SPDX-License-Identifier: Apache-2.0
#include "usbyte/topology.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "meshes.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

TEST(Topology, RanksAndCoordinatesAreOneToOne) {
  std::mt19937 rng(1);
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Topology topology = random_topology(rng);
    std::set<std::vector<int>> seen;
    for (int rank = 0; rank < topology.ranks(); ++rank) {
      const std::vector<int> at = topology.coordinates(rank);
      EXPECT_TRUE(seen.insert(at).second);
      EXPECT_EQ(topology.rank(at), rank);
      for (int d = 0; d < topology.ndim(); ++d) {
        const std::vector<int> group = topology.axis_group(rank, d);
        const auto dimension = static_cast<size_t>(d);
        ASSERT_EQ(std::ssize(group), topology.dimensions[dimension].size);
        EXPECT_TRUE(std::ranges::is_sorted(group));
        EXPECT_EQ(group[static_cast<size_t>(at[dimension])], rank);
        for (size_t i = 0; i < group.size(); ++i) {
          std::vector<int> expected = at;
          expected[dimension] = static_cast<int>(i);
          EXPECT_EQ(topology.coordinates(group[i]), expected);
        }
      }
    }
    EXPECT_EQ(std::ssize(seen), topology.ranks());
  }
}

TEST(Topology, TheInnermostCoordinateIsTheFastest) {
  const Topology topology{{{"node", 4}, {"rack", 3}, {"row", 2}}};
  EXPECT_EQ(topology.ranks(), 24);
  EXPECT_EQ(topology.coordinates(4 * 3 + 4 * 2 + 1), (std::vector{1, 2, 1}));
  EXPECT_EQ(topology.axis_group(5, 0), (std::vector{4, 5, 6, 7}));
  EXPECT_EQ(topology.axis_group(5, 1), (std::vector{1, 5, 9}));
  EXPECT_EQ(topology.axis_group(5, 2), (std::vector{5, 17}));
  for (int rank : {-1, 24}) EXPECT_THROW(topology.coordinates(rank), UsageError);
  EXPECT_THROW(topology.rank({0, 3, 0}), UsageError);
  EXPECT_THROW(topology.rank({0, 0}), UsageError);
  EXPECT_THROW(topology.axis_group(0, 3), UsageError);
  const Topology among = topology.among({2, 1, 2});
  EXPECT_EQ(among.ranks(), 4);
  EXPECT_EQ(topology.among({}), topology);
  for (const std::vector<int>& wrong : {std::vector{3, 1, 1}, {0, 1, 1}, {8, 1, 1}, {1, 1}}) {
    EXPECT_THROW(topology.among(wrong), UsageError);
  }
}

TEST(Dimension, StepsAndBytes) {
  const auto steps = [](DimensionKind kind, int size, bool adds = false) {
    return Dimension{"d", size, 1, 0, kind, adds}.steps();
  };
  for (int size : {2, 3, 8, 9}) {
    EXPECT_EQ(steps(DimensionKind::ring, size), size - 1);
    EXPECT_EQ(steps(DimensionKind::fully_connected, size), 1);
    EXPECT_EQ(steps(DimensionKind::switched, size), std::ceil(std::log2(size)));
    EXPECT_EQ(steps(DimensionKind::switched, size, true), 1);
  }
  EXPECT_EQ(steps(DimensionKind::switched, 1), 0);
  const Dimension ring{"d", 4, 10, 0.5}, sharp{"d", 4, 10, 0.5, DimensionKind::switched, true};
  EXPECT_EQ(ring.startup_s(), 1.5);
  EXPECT_EQ(ring.moved_bytes(80, true), 60);
  EXPECT_EQ(sharp.moved_bytes(80, true), 40);
  EXPECT_EQ(sharp.moved_bytes(80, false), 60);  // nobody else fills the way back
  EXPECT_EQ(ring.exchanged_bytes(80), 20 * (1 + 2 + 3));
  EXPECT_EQ(sharp.exchanged_bytes(80), 20 * 3);
  EXPECT_EQ((Dimension{"d", 1}.exchanged_bytes(80)), 0);
}

// Every message of an all_to_all, link by link: one dimension after the other, around a ring from
// each rank to the next.
TEST(Dimension, AnAllToAllIsPassedOnAroundRings) {
  std::mt19937 rng(5);
  for (int repeat = 0; repeat < 60; ++repeat) {
    Topology topology = random_topology(rng);
    while (topology.ranks() > 100) topology.dimensions.pop_back();
    const Route route = random_route(topology, rng);
    const int ranks = topology.ranks();
    const double bytes = 1e6;
    std::vector<std::vector<double>> sent(topology.dimensions.size());  // by dimension and rank
    for (auto& by_rank : sent) by_rank.resize(static_cast<size_t>(ranks));
    for (int from = 0; from < ranks; ++from) {
      for (int to = 0; to < ranks; ++to) {
        std::vector<int> at = topology.coordinates(from);
        for (int d : route) {
          const auto dimension = static_cast<size_t>(d);
          const Dimension& through = topology.dimensions[dimension];
          const int end = topology.coordinates(to)[dimension];
          while (at[dimension] != end) {
            sent[dimension][static_cast<size_t>(topology.rank(at))] += bytes / ranks;
            const bool ring = through.kind == DimensionKind::ring;
            at[dimension] = ring ? (at[dimension] + 1) % through.size : end;
          }
        }
      }
    }
    for (const MeshPhase& phase : mesh_phases(topology, Collective::all_to_all, route, bytes)) {
      for (double of_rank : sent[static_cast<size_t>(phase.dimension)]) {
        EXPECT_NEAR(of_rank, phase.moved_bytes, 1e-6 * bytes);
      }
    }
  }
}

TEST(Topology, PhasesLeaveLessInEachDimension) {
  const Topology topology{{{"a", 4, 10, 0.5}, {"b", 1}, {"c", 2, 5, 1}}};
  const std::vector<MeshPhase> phases = mesh_phases(topology, Collective::all_reduce, {0, 2}, 80);
  ASSERT_EQ(phases.size(), 4u);
  const auto down = Collective::reduce_scatter, up = Collective::all_gather;
  EXPECT_EQ(phases[0], (MeshPhase{0, down, 80, 60, 1.5, 6}));
  EXPECT_EQ(phases[1], (MeshPhase{2, down, 20, 10, 1, 2}));
  EXPECT_EQ(phases[2], (MeshPhase{2, up, 20, 10, 1, 2}));
  EXPECT_EQ(phases[3], (MeshPhase{0, up, 80, 60, 1.5, 6}));
  EXPECT_EQ(mesh_phases(topology, up, {2, 0}, 80).front(), (MeshPhase{0, up, 40, 30, 1.5, 3}));
  const auto both = mesh_phases(topology, Collective::all_to_all, {2, 0}, 80);
  EXPECT_EQ(both[0], (MeshPhase{2, Collective::all_to_all, 80, 40, 1, 8}));
  EXPECT_EQ(both[1], (MeshPhase{0, Collective::all_to_all, 80, 120, 1.5, 12}));
  for (const Route& wrong : {Route{0}, {0, 0}, {0, 1, 2}, {0, 3}, {}}) {
    EXPECT_THROW(mesh_phases(topology, down, wrong, 1), UsageError);
  }
  EXPECT_THROW(mesh_phases(topology, Collective::broadcast, {0, 2}, 1), UsageError);
}

TEST(Topology, EveryRouteMovesTheSame) {
  std::mt19937 rng(2);
  for (int repeat = 0; repeat < 100; ++repeat) {
    const Topology topology = random_topology(rng);
    const double bytes = 1e6, share = 1 - 1.0 / topology.ranks();
    double moved = 0;
    for (const MeshPhase& p :
         mesh_phases(topology, Collective::all_reduce, random_route(topology, rng), bytes)) {
      moved += p.moved_bytes;
    }
    EXPECT_NEAR(moved, 2 * bytes * share, 1e-3);
  }
}

TEST(Topology, JsonIsCanonical) {
  std::mt19937 rng(3);
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Topology topology = random_topology(rng, 1, 1, true);
    const Topology again = Topology::from_json(topology.to_json());
    EXPECT_EQ(again, topology);
    EXPECT_EQ(again.to_json(), topology.to_json());
  }
  const char* loose = R"({ "dimensions" : [{"kind": "switched", "size": 2, "bytes_per_s": 1,
                           "name": "a"}], "format": "usbyte-topology-1"})";
  EXPECT_EQ(Topology::from_json(loose), (Topology{{{"a", 2, 1, 0, DimensionKind::switched}}}));
}

std::string message(const std::string& dimensions) {
  try {
    Topology::from_json(R"({"format": "usbyte-topology-1", "dimensions": )" + dimensions + "}");
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

TEST(Topology, RejectsNonsenseAndNamesIt) {
  const std::vector<std::pair<const char*, const char*>> wrong = {
      {"[]", "no dimensions"},
      {"{}", "no list"},
      {"[3]", "dimension 0 is no object"},
      {R"([{"name": "a", "size": 0, "bytes_per_s": 1, "kind": "ring"}])", "'a': size is 0"},
      {R"([{"name": "a", "size": -2, "bytes_per_s": 1, "kind": "ring"}])", "size is -2"},
      {R"([{"name": "a", "size": 2.5, "bytes_per_s": 1, "kind": "ring"}])", "no integer"},
      {R"([{"name": "a", "size": "2", "bytes_per_s": 1, "kind": "ring"}])", "no integer"},
      {R"([{"name": "a", "size": 4294967298, "bytes_per_s": 1, "kind": "ring"}])", "4294967298"},
      {R"([{"name": "a", "size": 18446744073709551615, "bytes_per_s": 1, "kind": "ring"}])",
       "18446744073709551615"},
      {R"([{"name": "a", "size": 99999, "bytes_per_s": 1, "kind": "ring"},
           {"name": "b", "size": 99999, "bytes_per_s": 1, "kind": "ring"}])",
       "'b': there are more ranks"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 0, "kind": "ring"}])", "bytes_per_s"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1e999, "kind": "ring"}])", "malformed"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": NaN, "kind": "ring"}])", "malformed"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": null, "kind": "ring"}])", "no number"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": true, "kind": "ring"}])", "no number"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1, "latency_s": -1, "kind": "ring"}])",
       "latency_s"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1, "kind": "torus"}])", "'torus'"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1, "kind": 1}])", "malformed"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1, "kind": "ring", "speed": 1}])", "'speed'"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1}])", "no kind"},
      {R"([{"name": "", "size": 2, "bytes_per_s": 1, "kind": "ring"}])", "name is empty"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1, "kind": "ring"},
           {"name": "a", "size": 2, "bytes_per_s": 1, "kind": "ring"}])",
       "dimension 1 'a': the name is empty or taken"},
      {R"([{"name": "a", "size": 2, "bytes_per_s": 1, "kind": "ring",
            "in_network_reduction": true}])",
       "only a switch adds up"}};
  for (const auto& [json, what] : wrong) {
    EXPECT_NE(message(json).find(what), std::string::npos) << json << "\n" << message(json);
  }
  for (const char* json : {"", "{", "[]", "3", "null", R"({"format": "usbyte-topology-1"})",
                           R"({"format": 3, "dimensions": []})",
                           R"({"format": "usbyte-network-1", "dimensions": []})"}) {
    EXPECT_THROW(Topology::from_json(json), UsageError) << json;
  }
  EXPECT_THROW(Topology::from_json(std::string(100'000, '[')), UsageError);
  EXPECT_THROW((Topology{{{"a", 2, std::nan("")}}}.validate()), UsageError);
  EXPECT_THROW((Topology{{{"a", 2, 1, std::nan("")}}}.validate()), UsageError);
  EXPECT_THROW((Topology{std::vector<Dimension>(65, {"a", 1})}.validate()), UsageError);
}

TEST(Topology, ChangedBytesGiveATopologyOrAUsageError) {
  std::mt19937 rng(4);
  const std::string alphabet = "{}[],:\"0123456789.-+eEtrufalsn\\ \xff";
  int rejected = 0;
  constexpr int kRepeats = 5000;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::string json = random_topology(rng, 1, 1, true).to_json();
    for (size_t changes = 1 + rng() % 3; changes > 0; --changes) {
      json[rng() % json.size()] = alphabet[rng() % alphabet.size()];
    }
    try {
      const Topology topology = Topology::from_json(json);
      topology.validate();
      EXPECT_EQ(Topology::from_json(topology.to_json()), topology);
    } catch (const UsageError&) {
      ++rejected;
    }
  }
  EXPECT_GT(rejected, kRepeats / 2);
}

}  // namespace
}  // namespace usbyte
