#include "usbyte/line_choice.h"

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

using Ways = std::vector<std::optional<LineWay>>;

// Of a byte, an all_reduce takes 5e-10 s inside, and of what is left of it 1e-8 s between: 20
// times.
const Topology kMesh{{{"inside", 2, 1e9, 1e-5}, {"between", 2, 2.5e7, 1e-4}}};

Op op_of(Block block, std::string codec) {
  return {Collective::all_reduce,
          {block},
          std::numeric_limits<int64_t>::max(),
          false,
          std::move(codec)};
}

TEST(LineChoice, TheSlowerDimensionHasTheRatio) {
  const Op op = op_of({0, 10'000}, "topk:0.01");
  const std::vector<LineWay> expected = {
      {0, "none", "topk:0.01", "none"},     {0, "none", "topk:0.01", "topk:0.021,feedback=off"},
      {0, "topk:0.01", "none", "none"},     {0, "topk:0.01", "none", "topk:0.041,feedback=off"},
      {1, "none", "topk:0.01", "none"},     {1, "none", "topk:0.01", "topk:0.021,feedback=off"},
      {1, "topk:0.2", "topk:0.01", "none"}, {1, "topk:0.2", "topk:0.01", "topk:0.021,feedback=off"},
  };
  // Scattered between, 80 times as long as sums inside, which then need no codec.
  EXPECT_EQ(line_ways(op, kMesh), expected);
  EXPECT_EQ(line_codecs(Plan("t", {{"w", 10'000, DType::float32, 0}}, {op}), kMesh),
            (std::vector<std::string>{"topk:0.01", "topk:0.021,feedback=off",
                                      "topk:0.041,feedback=off", "topk:0.2"}));
}

TEST(LineChoice, WhatCannotBeCodedTwiceIsNot) {
  const auto most = [](const char* codec) {
    size_t coded = 0;
    for (const LineWay& way : line_ways(op_of({0, 100}, codec), kMesh)) {
      const size_t steps = (way.scatter != "none") + (way.sum != "none") + (way.gather != "none");
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
  EXPECT_TRUE(line_ways(op_of({0, 9}, "fp16"), {{{"a", 4, 1}, {"b", 1, 1}}}).empty());
  EXPECT_TRUE(line_ways(op_of({0, 9}, "fp16"), {{{"a", 2, 1}, {"b", 2, 1}, {"c", 2, 1}}}).empty());
}

TEST(LineChoice, GathersHaveRoomForAllThatDiffersFromZero) {
  std::mt19937 rng(1);
  for (int i = 0; i < cases(200); ++i) {
    const Topology mesh{{{"a", static_cast<int>(uniform(rng, 2, 5)), uniform_real(rng, 1, 9)},
                         {"b", static_cast<int>(uniform(rng, 2, 5)), uniform_real(rng, 1, 9)}}};
    const Block block{0, uniform(rng, 1, 3000)};
    const double ratio = std::pow(10, uniform_real(rng, -4, 0));
    for (const LineWay& way : line_ways(op_of(block, "topk:" + std::to_string(ratio)), mesh)) {
      const auto [inside, between] = scatter_and_sum(mesh, way.sum_line);
      const int shards = mesh.dimensions[static_cast<size_t>(inside)].size;
      const int ranks = mesh.dimensions[static_cast<size_t>(between)].size;
      const auto gather = make_codec(way.gather), sum = make_codec(way.sum),
                 scatter = make_codec(way.scatter);
      for (int rank = 0; gather && rank < shards; ++rank) {
        const int64_t count = shard(block, rank, shards).numel();
        if (count == 0) continue;
        const int64_t parts = sum ? ranks * sum->picks()->picked(count)
                                  : ranks * shards * scatter->picks()->picked(count);
        EXPECT_GE(gather->picks()->picked(count), std::min(parts, count));
      }
    }
  }
}

CodecCosts costs_of(const Plan& plan, const Topology& mesh, double s_per_byte) {
  std::vector<std::string> specs = line_codecs(plan, mesh);
  for (const Op& op : plan.ops()) specs.push_back(op.codec);
  CodecCosts out;
  for (const std::string& spec : specs) {
    if (spec != "none") out.by_spec[spec] = {{1e-5, s_per_byte, 1e-5}, {1e-5, s_per_byte, 1e-5}};
  }
  return out;
}

// Every op every way.
double brute_force_s(const Plan& plan, const Topology& mesh, Simulator& simulator, Ways& ways,
                     size_t op) {
  if (op == ways.size()) return simulator.step_s(along_lines(plan, mesh, ways));
  ways[op].reset();
  double best_s = brute_force_s(plan, mesh, simulator, ways, op + 1);
  for (const LineWay& way : line_ways(plan.ops()[op], mesh)) {
    ways[op] = way;
    best_s = std::min(best_s, brute_force_s(plan, mesh, simulator, ways, op + 1));
  }
  ways[op].reset();
  return best_s;
}

TEST(LineChoice, IsNearTheBestOfAllAndNeverSlowerThanThePlan) {
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
    const Plan chosen = with_lines(coded, profile, network, options.overlap, costs);
    Simulator simulator(profile, network, options.overlap, false, costs);
    Ways ways(coded.ops().size());
    const double best_s = brute_force_s(coded, *network.topology, simulator, ways, 0);
    const double chosen_s = simulator.step_s(chosen), plan_s = simulator.step_s(coded);
    EXPECT_LE(chosen_s, plan_s);
    EXPECT_LE(chosen_s, 1.05 * best_s);
    faster += chosen_s < 0.99 * plan_s;
    std::set<std::string> kinds;
    for (const Op& op : chosen.ops()) {
      if (op.codec != "none") kinds.insert(std::to_string(op.line));
    }
    mixed += kinds.size() > 1;
  }
  EXPECT_GT(faster, cases(60) / 4);
  EXPECT_GT(mixed, 0);
}

TEST(LineChoice, NothingChangesWithoutTwoDimensions) {
  const Plan plan("t", {{"w", 100, DType::float32, 0}}, {op_of({0, 100}, "fp16")});
  Profile profile;
  profile.tensors = plan.tensors();
  profile.need_s = {0};
  profile.ready_s = {1};
  NetworkModel network = NetworkModel::ring(4, 1e-3, 1e9);
  EXPECT_EQ(with_lines(plan, profile, network, Overlap::backward, {}), plan);
  network.topology = Topology{{{"a", 4, 1e9}}};
  EXPECT_EQ(with_lines(plan, profile, network, Overlap::backward, {}), plan);
  network.topology = kMesh;
  CodecCosts costs;
  costs.by_spec["int8"] = {};
  EXPECT_THROW(with_lines(plan, profile, network, Overlap::backward, costs), UsageError);
}

}  // namespace
}  // namespace usbyte
