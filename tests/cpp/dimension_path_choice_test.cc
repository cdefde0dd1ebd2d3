// SPDX-License-Identifier: Apache-2.0
#include "policy/transforms/routing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "random_job.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

using Paths = std::vector<std::optional<DimensionPath>>;

// Scattered inside, messages of a byte take 5e-10 s, and 2e-8 s gathered between: 40 times.
const Topology kMesh{{{"inside", 2, 1e9, 1e-5}, {"between", 2, 2.5e7, 1e-4}}};

Op op_of(Block block, std::string codec) {
  return {Collective::all_reduce,
          {block},
          std::numeric_limits<int64_t>::max(),
          false,
          std::move(codec)};
}

TEST(DimensionPathChoice, TheSlowerDimensionHasTheRatio) {
  const std::string few = "topk:0.024,feedback=off";  // room for 2 %
  const std::vector<DimensionPath> expected = {
      {1, "none", "topk:0.01", "none"},     {1, "none", "topk:0.01", few},
      {1, "topk:0.4", "topk:0.01", "none"}, {1, "topk:0.4", "topk:0.01", few},
      {0, "none", "topk:0.01", "none"},     {0, "none", "topk:0.01", few},
      {0, "topk:0.01", "topk:0.4", "none"},
  };
  EXPECT_EQ(dimension_paths(op_of({0, 10'000}, "topk:0.01"), kMesh), expected);
  EXPECT_EQ(dimension_codecs("topk:0.01", kMesh),
            (std::vector<std::string>{"topk:0.01", few, "topk:0.4"}));
  EXPECT_EQ(dimension_paths(op_of({0, 10'000}, "topk:1e-2"), kMesh), expected);
  // Shards of 30 have one picked each, and no room for two.
  for (const DimensionPath& path : dimension_paths(op_of({0, 60}, "topk:0.01"), kMesh)) {
    EXPECT_EQ(path.gather, "none");
  }
  // One so fast that it needs none.
  const Topology fast{{{"inside", 2, 1e9}, {"between", 2, 1e6}}};
  EXPECT_EQ(dimension_paths(op_of({0, 10'000}, "topk:0.01"), fast)[4],
            (DimensionPath{0, "topk:0.01", "none", "none"}));
  EXPECT_EQ(dimension_paths(op_of({0, 10'000}, "topk:0.01,feedback=off"), kMesh)[2].scatter,
            "topk:0.4,feedback=off");
}

// Both dimensions are busy for as long, whatever their sizes and speeds.
TEST(DimensionPathChoice, MessagesTakeAsLongInBothDimensions) {
  std::mt19937 rng(3);
  int coded = 0;
  for (int i = 0; i < cases(100); ++i) {
    const Topology mesh{{{"a", static_cast<int>(uniform(rng, 2, 6)), uniform_real(rng, 1e8, 1e9)},
                         {"b", static_cast<int>(uniform(rng, 2, 6)), uniform_real(rng, 1e8, 1e9)}}};
    const Op op = op_of({0, 3'600'000}, "topk:0.001");
    const Plan plan("t", {{"w", 3'600'000, DType::float32, 0}}, {op});
    for (const DimensionPath& path : dimension_paths(op, mesh)) {
      if (path.scatter == "none" || path.sum == "none") continue;
      ++coded;
      const Plan along = along_dimensions(plan, mesh, Paths{path});
      const double scatter_s = dimension_cost(along, along.ops()[0], mesh).transfer_s;
      const double sum_s = dimension_cost(along, along.ops()[1], mesh).transfer_s;
      EXPECT_NEAR(scatter_s / sum_s, 1, 0.02);
      EXPECT_TRUE(path.scatter == op.codec || path.sum == op.codec);
    }
  }
  EXPECT_GE(coded, cases(100));
}

TEST(DimensionPathChoice, WhatCannotBeCodedTwiceIsNot) {
  const auto most = [](const char* codec) {
    size_t coded = 0;
    for (const DimensionPath& path : dimension_paths(op_of({0, 100}, codec), kMesh)) {
      const size_t steps =
          (path.scatter != "none") + (path.sum != "none") + (path.gather != "none");
      coded = std::max(coded, steps);
    }
    return coded;
  };
  EXPECT_EQ(most("fp16"), 3U);
  EXPECT_EQ(most("int8"), 2U);
  EXPECT_EQ(most("qsgd:4"), 2U);
  EXPECT_EQ(most("signum"), 1U);
  EXPECT_EQ(most("signsgd"), 1U);
  EXPECT_EQ(most("dgc:0.01,warmup=100"), 1U);  // sends more at first than can be gathered
  EXPECT_EQ(most("powersgd:2"), 0U);
  EXPECT_EQ(most("none"), 0U);
  EXPECT_TRUE(dimension_paths(op_of({0, 9}, "fp16"), {{{"a", 4, 1}, {"b", 1, 1}}}).empty());
  EXPECT_TRUE(
      dimension_paths(op_of({0, 9}, "fp16"), {{{"a", 2, 1}, {"b", 2, 1}, {"c", 2, 1}}}).empty());
}

TEST(DimensionPathChoice, GathersHaveRoomForAllThatDiffersFromZero) {
  std::mt19937 rng(1);
  int gathers = 0;
  for (int i = 0; i < cases(200); ++i) {
    const Topology mesh{{{"a", static_cast<int>(uniform(rng, 2, 5)), uniform_real(rng, 1, 9)},
                         {"b", static_cast<int>(uniform(rng, 2, 5)), uniform_real(rng, 1, 9)}}};
    const int64_t cut = uniform(rng, 1, 3000);
    Op op = op_of({0, cut}, "");
    if (uniform(rng, 0, 1)) op.blocks.push_back({cut, cut + uniform(rng, 1, 3000)});
    const double ratio = std::pow(10, uniform_real(rng, -4, 0));
    op.codec = (uniform(rng, 0, 1) ? "topk:" : "dct:") + std::to_string(ratio);
    for (const DimensionPath& path : dimension_paths(op, mesh)) {
      const auto [inside, between] = scatter_and_sum(mesh, path.sum_dimension);
      const int shards = mesh.dimensions[static_cast<size_t>(inside)].size;
      const int ranks = mesh.dimensions[static_cast<size_t>(between)].size;
      const auto gather = make_codec(path.gather), sum = make_codec(path.sum),
                 scatter = make_codec(path.scatter);
      for (Block block : op.blocks) {
        for (int rank = 0; gather && rank < shards; ++rank) {
          const int64_t count = shard(block, rank, shards).numel();
          const int64_t parts = sum ? ranks * sum->selection()->selected_count(count)
                                    : ranks * shards * scatter->selection()->selected_count(count);
          EXPECT_GE(gather->selection()->selected_count(count), std::min(parts, count));
          ++gathers;
        }
      }
    }
  }
  EXPECT_GT(gathers, 0);
}

CodecCosts costs_of(const Plan& plan, const Topology& mesh, double s_per_byte) {
  CodecCosts out;
  const auto add = [&](const std::string& spec) {
    if (spec != "none") out.by_spec[spec] = {{1e-5, s_per_byte, 1e-5}, {1e-5, s_per_byte, 1e-5}};
  };
  for (const Op& op : plan.ops()) {
    add(op.codec);
    std::ranges::for_each(dimension_codecs(op.codec, mesh), add);
  }
  return out;
}

// Every op every path.
double brute_force_s(const Plan& plan, const Topology& mesh, Simulator& simulator, Paths& paths,
                     size_t op) {
  if (op == paths.size()) return simulator.step_s(along_dimensions(plan, mesh, paths));
  paths[op].reset();
  double best_s = brute_force_s(plan, mesh, simulator, paths, op + 1);
  for (const DimensionPath& path : dimension_paths(plan.ops()[op], mesh)) {
    paths[op] = path;
    best_s = std::min(best_s, brute_force_s(plan, mesh, simulator, paths, op + 1));
  }
  paths[op].reset();
  return best_s;
}

TEST(DimensionPathChoice, IsNearTheBestOfAllAndNeverSlowerThanThePlan) {
  constexpr const char* kCodecs[] = {"none", "topk:0.01", "topk:0.001", "fp16", "int8"};
  std::mt19937 rng(2);
  int faster = 0, mixed = 0;
  for (int i = 0; i < cases(60); ++i) {
    const Profile profile = random_chain(rng, 4, 3e7);
    NetworkModel network = NetworkModel::ring(4, 1e-4, 2e7);
    const auto speed = [&] { return 2e7 * std::pow(10, uniform_real(rng, -0.5, 1.5)); };
    network.topology = Topology{{{"inside", 2, speed(), 1e-4}, {"between", 2, speed(), 1e-4}}};
    PolicyOptions options;
    options.overlap = uniform(rng, 0, 1) ? Overlap::forward : Overlap::backward;
    for (size_t t = 0; t < profile.tensors.size(); ++t) {
      options.codec_of.push_back(kCodecs[uniform(rng, 0, 4)]);
    }
    const Plan plan = wfbp(profile, network, options);
    const Plan coded = with_codecs(plan, options.codec_of);
    const CodecCosts costs = costs_of(coded, *network.topology, uniform_real(rng, 1e-11, 1e-9));
    const Plan chosen = with_dimension_paths(coded, profile, network, options.overlap, costs);
    Simulator simulator(profile, network, options.overlap, false, costs);
    Paths paths(coded.ops().size());
    const double best_s = brute_force_s(coded, *network.topology, simulator, paths, 0);
    const double chosen_s = simulator.step_s(chosen), plan_s = simulator.step_s(coded);
    EXPECT_LE(chosen_s, plan_s);
    EXPECT_LE(chosen_s, 1.05 * best_s);  // 2 % of which are the price of a second loss
    faster += chosen_s < 0.99 * plan_s;
    std::set<std::string> kinds;
    for (const Op& op : chosen.ops()) {
      if (op.codec != "none") kinds.insert(std::to_string(op.dimension));
    }
    mixed += kinds.size() > 1;
  }
  EXPECT_GT(faster, cases(60) / 4);
  EXPECT_GT(mixed, 0);
}

TEST(DimensionPathChoice, NothingChangesWithoutTwoDimensions) {
  const Plan plan("t", {{"w", 100, DType::float32, 0}}, {op_of({0, 100}, "fp16")});
  Profile profile;
  profile.tensors = plan.tensors();
  profile.need_s = {0};
  profile.ready_s = {1};
  NetworkModel network = NetworkModel::ring(4, 1e-3, 1e9);
  EXPECT_EQ(with_dimension_paths(plan, profile, network, Overlap::backward, {}), plan);
  network.topology = Topology{{{"a", 4, 1e9}}};
  EXPECT_EQ(with_dimension_paths(plan, profile, network, Overlap::backward, {}), plan);
  network.topology = kMesh;
  CodecCosts costs;
  costs.by_spec["int8"] = {};
  EXPECT_THROW(with_dimension_paths(plan, profile, network, Overlap::backward, costs), UsageError);
}

}  // namespace
}  // namespace usbyte
