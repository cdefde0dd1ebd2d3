// SPDX-License-Identifier: Apache-2.0
#include "plan/dimension_path.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <set>

#include "plan/step.h"
#include "random_job.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr auto kScatter = Collective::reduce_scatter;
constexpr auto kWhole = Collective::all_reduce;
constexpr auto kGather = Collective::all_gather;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

const Topology kMesh{{{"inside", 2, 1e9, 1e-5}, {"between", 3, 1e7, 1e-4}}};

Op op_of(Collective kind, Block block, int dimension, std::string codec = "none") {
  Op op{kind, {block}, kUnlimited, false, std::move(codec)};
  op.dimension = dimension;
  return op;
}

Plan plan_of(std::vector<Op> ops, int64_t numel = 10) {
  return Plan("test", {{"w", numel, DType::float32, 0, 1, 0}}, std::move(ops));
}

// All that can, but for those with schemes, with codecs in one dimension only.
Plan along_dimensions(const Plan& plan, const Topology& mesh, int coded) {
  std::vector<std::optional<DimensionPath>> paths(plan.ops().size());
  for (size_t i = 0; i < paths.size(); ++i) {
    const Op& op = plan.ops()[i];
    if (has_dimension_paths(op) && op.scheme.empty())
      paths[i] = DimensionPath{coded, "none", op.codec, "none"};
  }
  return along_dimensions(plan, mesh, paths);
}

TEST(DimensionPath, PlansHoldThem) {
  const Block all{0, 10};
  const Plan plan =
      plan_of({op_of(kScatter, all, 0), op_of(kWhole, all, 1, "topk:0.5"), op_of(kGather, all, 0)});
  EXPECT_EQ(Plan::from_json(plan.to_json()), plan);
  EXPECT_NE(plan.describe(1).find("along dimension 1"), std::string::npos);
  EXPECT_EQ(plan.tensors_of(plan.ops()[1]), std::vector<int>{0});
}

TEST(DimensionPath, OlderPlanFilesAreRead) {
  const Block all{0, 10};
  const Plan plan =
      plan_of({op_of(kScatter, all, 0), op_of(kWhole, all, 1), op_of(kGather, all, 0)});
  std::string json = plan.to_json();
  EXPECT_EQ(json.find("line"), std::string::npos);
  for (size_t at; (at = json.find("\"dimension\"")) != std::string::npos;) {
    json.replace(at, 11, "\"line\"");
  }
  EXPECT_EQ(Plan::from_json(json), plan);
}

TEST(DimensionPath, PlansWhoseShardsAreNotAddedUpOnceAreRefused) {
  const Block all{0, 10}, half{0, 5}, rest{5, 10};
  const Op scatter = op_of(kScatter, all, 0), sum = op_of(kWhole, all, 1),
           gather = op_of(kGather, all, 0);
  EXPECT_NO_THROW(plan_of({scatter, sum, gather}));
  EXPECT_THROW(plan_of({scatter, gather}), PlanError);
  EXPECT_THROW(plan_of({scatter, sum, sum, gather}), PlanError);
  EXPECT_THROW(plan_of({scatter, gather, sum}), PlanError);
  EXPECT_THROW(plan_of({sum, scatter, gather}), PlanError);
  EXPECT_THROW(plan_of({sum}), PlanError);
  EXPECT_THROW(plan_of({scatter, sum}), PlanError);
  EXPECT_THROW(plan_of({scatter, op_of(kWhole, all, 0), gather}), PlanError);
  EXPECT_THROW(plan_of({scatter, sum, op_of(kGather, all, 1)}), PlanError);
  EXPECT_THROW(plan_of({scatter, sum, op_of(kGather, all, -1)}), PlanError);
  EXPECT_THROW(plan_of({op_of(kScatter, all, -1), sum, op_of(kGather, all, -1)}), PlanError);
  EXPECT_THROW(plan_of({scatter, op_of(kWhole, half, 1), op_of(kWhole, rest, 1), gather}),
               PlanError);
  EXPECT_THROW(plan_of({scatter, op_of(kWhole, all, -2), gather}), PlanError);
  EXPECT_THROW(plan_of({scatter, op_of(kWhole, all, 1, "powersgd:2"), gather}), PlanError);
}

TEST(DimensionPath, WhatIsRememberedIsWhatTheOtherStepsCanGoOnWith) {
  const Block all{0, 10};
  const auto with = [&](const std::string& scatter, const std::string& sum,
                        const std::string& gather) {
    return plan_of({op_of(kScatter, all, 0, scatter), op_of(kWhole, all, 1, sum),
                    op_of(kGather, all, 0, gather)});
  };
  EXPECT_NO_THROW(with("topk:0.5", "topk:0.1", "none"));
  EXPECT_NO_THROW(with("int8", "dgc:0.1", "fp16"));
  EXPECT_NO_THROW(with("topk:0.5", "none", "topk:0.5,feedback=off"));
  EXPECT_NO_THROW(with("fp16", "signum", "none"));
  EXPECT_THROW(with("topk:0.5", "topk:0.1", "topk:0.5"), PlanError);  // ranks would part
  EXPECT_THROW(with("topk:0.5", "signum", "none"), PlanError);        // its row is a momentum
  EXPECT_THROW(with("dgc:0.5", "dgc:0.1", "none"), PlanError);
  EXPECT_THROW(with("signsgd", "fp16", "none"), PlanError);
  EXPECT_THROW(with("powersgd:1", "fp16", "none"), PlanError);
  EXPECT_THROW(with("none", "fp16", "powersgd:1"), PlanError);
}

TEST(DimensionPath, EachStepWaitsForTheOneBefore) {
  const Block a{0, 10}, b{10, 20};
  const Plan plan("test", {{"a", 10, DType::float32, 0, 1, 0}, {"b", 10, DType::float32, 10, 1, 0}},
                  {op_of(kScatter, a, 0), op_of(kWhole, a, 1), op_of(kScatter, b, 0),
                   op_of(kWhole, b, 1), op_of(kGather, a, 0), op_of(kGather, b, 0)});
  Step step(plan);
  step.begin();
  step.ready(0);
  ASSERT_TRUE(step.launchable());
  EXPECT_EQ(step.launch(), 0);
  EXPECT_FALSE(step.launchable());  // a's sum waits for its scatter
  step.complete(0);
  EXPECT_EQ(step.launch(), 1);
  EXPECT_FALSE(step.launchable());  // b is not ready
  step.ready(1);
  EXPECT_EQ(step.launch(), 2);
  EXPECT_TRUE(step.complete(1).arrived.empty());
  step.complete(2);
  EXPECT_EQ(step.launch(), 3);
  EXPECT_EQ(step.launch(), 4);  // a's shards are added up
  EXPECT_FALSE(step.launchable());
  EXPECT_FALSE(step.reduced());
  step.complete(3);
  EXPECT_TRUE(step.reduced());
  EXPECT_EQ(step.launch(), 5);
  EXPECT_EQ(step.complete(4).arrived.front(), 0);
  EXPECT_FALSE(step.drained());
  EXPECT_EQ(step.complete(5).arrived.front(), 1);
  EXPECT_TRUE(step.drained());
}

TEST(DimensionPath, ShardsTileABlockAndAreThoseOfTheInnerDimension) {
  std::mt19937 rng(1);
  for (int i = 0; i < cases(100); ++i) {
    const int64_t numel = uniform(rng, 1, 20);
    const Plan plan =
        along_dimensions(plan_of({op_of(kWhole, {0, numel}, -1, "topk:0.5")}, numel), kMesh, 1);
    ASSERT_EQ(plan.ops().size(), 3U);
    std::vector<int> covered(static_cast<size_t>(numel));
    for (int rank = 0; rank < kMesh.ranks(); ++rank) {
      EXPECT_EQ(worked_on(plan.ops()[0], &kMesh, rank), plan.ops()[0].blocks);
      const std::vector<Block> own = worked_on(plan.ops()[1], &kMesh, rank);
      EXPECT_EQ(own, worked_on(plan.ops()[1], &kMesh, kMesh.axis_group(rank, 1).front()));
      for (Block b : own) {
        for (int64_t e = b.begin; e < b.end; ++e) ++covered[static_cast<size_t>(e)];
      }
    }
    EXPECT_EQ(covered, std::vector<int>(static_cast<size_t>(numel), 3));
  }
}

TEST(DimensionPath, OnlyOpsWithCodecsGoAlongThem) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(
        {std::string(1, static_cast<char>('a' + i)), 100, DType::float32, 100 * i, 1, 0});
  }
  Op scheme = op_of(kWhole, {300, 400}, -1, "topk:0.1");
  scheme.scheme = "zen";
  const Plan plan("test", tensors,
                  {op_of(kWhole, {0, 100}, -1, "topk:0.1"), op_of(kWhole, {100, 200}, -1),
                   op_of(kWhole, {200, 300}, -1, "fp16"), scheme});
  const Plan along = along_dimensions(plan, kMesh, 1);
  std::vector<std::pair<Collective, int>> found;
  for (const Op& op : along.ops()) found.emplace_back(op.kind, op.dimension);
  const std::vector<std::pair<Collective, int>> expected = {
      {kScatter, 0}, {kWhole, 1}, {kWhole, -1}, {kGather, 0},
      {kScatter, 0}, {kWhole, 1}, {kWhole, -1}, {kGather, 0}};
  EXPECT_EQ(found, expected);
  EXPECT_EQ(along_dimensions(along, kMesh, 1), along);
  EXPECT_EQ(with_codecs(along, std::vector<std::string>(4, "none")), along);
  EXPECT_EQ(along_dimensions(plan, kMesh, 0).ops()[1].dimension, 0);
  EXPECT_EQ(along_dimensions(plan, kMesh, std::vector<std::optional<DimensionPath>>(4)), plan);
  EXPECT_THROW(along_dimensions(plan, kMesh, 2), UsageError);
  EXPECT_THROW(along_dimensions(plan, {{{"a", 2, 1}}}, 0), UsageError);
  EXPECT_THROW(along_dimensions(plan, kMesh, std::vector<std::optional<DimensionPath>>(3)),
               UsageError);
  const std::vector<std::optional<DimensionPath>> uncoded = {{}, DimensionPath{1}, {}, {}};
  EXPECT_THROW(along_dimensions(plan, kMesh, uncoded), UsageError);
  EXPECT_THROW(along_dimensions(plan, {{{"a", 2, 1}, {"b", 2, 1}, {"c", 2, 1}}}, 0), UsageError);
}

TEST(DimensionPath, PlansOfOtherDimensionsAreNotPredicted) {
  const Block all{0, 100};
  const Plan plan = plan_of({op_of(kScatter, all, 0, "topk:0.1"), op_of(kWhole, all, 1, "topk:0.1"),
                             op_of(kGather, all, 0, "fp16")},
                            100);
  Profile profile;
  profile.tensors = plan.tensors();
  profile.need_s = {0};
  profile.ready_s = {1};
  CodecCosts costs;
  costs.by_spec = {{"topk:0.1", {}}, {"fp16", {}}};
  const auto predict = [&](const Topology& mesh, const Plan& of) {
    NetworkModel network = NetworkModel::ring(mesh.ranks(), 0, 1e7);
    network.topology = mesh;
    Simulator(profile, network, Overlap::backward, false, costs).predict(of);
  };
  EXPECT_NO_THROW(predict(kMesh, plan));
  EXPECT_THROW(predict({{{"a", 4, 1}}}, plan), UsageError);
  EXPECT_THROW(predict({{{"a", 4, 1}, {"b", 1, 1}}}, plan), UsageError);
  EXPECT_THROW(predict({{{"a", 2, 1}, {"b", 2, 1}, {"c", 2, 1}}}, plan), UsageError);
  const Plan elsewhere =
      plan_of({op_of(kScatter, all, 2), op_of(kWhole, all, 1), op_of(kGather, all, 2)}, 100);
  EXPECT_THROW(predict({{{"a", 2, 1}, {"b", 2, 1}, {"c", 1, 1}}}, elsewhere), UsageError);
  EXPECT_THROW(predict(kMesh, elsewhere), UsageError);
  NetworkModel network = NetworkModel::ring(4, 0, 1e7);
  network.topology = Topology{{{"a", 4, 1}}};
  EXPECT_THROW(Simulator(profile, network, Overlap::backward, false, costs).step_s(plan),
               UsageError);
}

TEST(DimensionPath, CostsAreThoseOfTheirDimension) {
  const int64_t numel = 1'000'000;
  const Plan plan =
      along_dimensions(plan_of({op_of(kWhole, {0, numel}, -1, "topk:0.01")}, numel), kMesh, 1);
  const double bytes = 4e6;
  const DimensionCost down = dimension_cost(plan, plan.ops()[0], kMesh);
  EXPECT_DOUBLE_EQ(down.startup_s, 1e-5);
  EXPECT_DOUBLE_EQ(down.transfer_s, bytes / 2 / 1e9);
  const DimensionCost sum = dimension_cost(plan, plan.ops()[1], kMesh);
  const auto message = static_cast<double>(make_codec("topk:0.01")->message_bytes(numel / 2));
  EXPECT_DOUBLE_EQ(sum.startup_s, 2e-4);  // two steps of a ring of three
  EXPECT_DOUBLE_EQ(sum.transfer_s, 2 * message / 1e7);
  const Plan halves =
      along_dimensions(plan_of({op_of(kWhole, {0, numel}, -1, "fp16")}, numel), kMesh, 1);
  const DimensionCost half = dimension_cost(halves, halves.ops()[1], kMesh);
  EXPECT_DOUBLE_EQ(half.startup_s, 4e-4);
  EXPECT_DOUBLE_EQ(half.transfer_s, 2 * (bytes / 2 / 2) * 2 / 3 / 1e7);

  // Each block of a scatter is a message of its own; what is coded is one.
  const Plan blocks = along_dimensions(
      plan_of({{kWhole, {{0, numel / 2}, {numel / 2, numel}}, kUnlimited, false, "topk:0.01"}},
              numel),
      kMesh, 1);
  EXPECT_DOUBLE_EQ(dimension_cost(blocks, blocks.ops()[0], kMesh).startup_s, 2e-5);
  EXPECT_DOUBLE_EQ(dimension_cost(blocks, blocks.ops()[1], kMesh).startup_s, 2e-4);

  // In the other dimension: a message for each shard to its rank, and of each to all.
  const std::vector<std::optional<DimensionPath>> path = {
      DimensionPath{1, "topk:0.1", "topk:0.01", "topk:0.2,feedback=off"}};
  const Plan coded =
      along_dimensions(plan_of({op_of(kWhole, {0, numel}, -1, "topk:0.01")}, numel), kMesh, path);
  const auto shard_of = [](const char* spec, int64_t ranks = 2) {
    return static_cast<double>(make_codec(spec)->message_bytes((numel + ranks - 1) / ranks));
  };
  EXPECT_DOUBLE_EQ(dimension_cost(coded, coded.ops()[0], kMesh).startup_s, 1e-5);
  EXPECT_DOUBLE_EQ(dimension_cost(coded, coded.ops()[0], kMesh).transfer_s,
                   shard_of("topk:0.1") / 1e9);
  EXPECT_DOUBLE_EQ(dimension_cost(coded, coded.ops()[2], kMesh).transfer_s,
                   shard_of("topk:0.2") / 1e9);
  const std::vector<std::optional<DimensionPath>> other = {
      DimensionPath{0, "topk:0.1", "topk:0.01"}};
  const Plan among_three =
      along_dimensions(plan_of({op_of(kWhole, {0, numel}, -1, "topk:0.01")}, numel), kMesh, other);
  EXPECT_DOUBLE_EQ(dimension_cost(among_three, among_three.ops()[0], kMesh).transfer_s,
                   2 * shard_of("topk:0.1", 3) / 1e7);

  Profile profile;
  profile.tensors = plan.tensors();
  profile.need_s = {0};
  profile.ready_s = {1};
  NetworkModel network = NetworkModel::ring(6, 0, 1e7);
  network.topology = kMesh;
  Simulator simulator(profile, network, Overlap::backward);
  EXPECT_NEAR(simulator.step_s(plan),
              1 + 2 * (down.startup_s + down.transfer_s) + sum.startup_s + sum.transfer_s, 1e-9);
  network.topology.reset();
  EXPECT_THROW(Simulator(profile, network, Overlap::backward).step_s(plan), UsageError);
}

}  // namespace
}  // namespace usbyte
