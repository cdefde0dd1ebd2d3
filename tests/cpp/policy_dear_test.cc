// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>

#include "policy/baselines/dear.h"
#include "random_job.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr Collective kScatter = Collective::reduce_scatter, kGather = Collective::all_gather;

using Ops = std::vector<std::pair<Collective, Block>>;

Ops ops_of(const Plan& plan) {
  Ops out;
  for (const Op& op : plan.ops()) {
    EXPECT_TRUE(op.fence);
    EXPECT_EQ(op.blocks.size(), 1u);
    out.emplace_back(op.kind, op.blocks.front());
  }
  return out;
}

Profile layers(std::vector<double> need_s, std::vector<double> ready_s) {
  Profile p;
  for (size_t i = 0; i < need_s.size(); ++i) {
    p.tensors.push_back(
        {"t" + std::to_string(i), 10, DType::float32, 10 * static_cast<int64_t>(i)});
  }
  p.need_s = std::move(need_s);
  p.ready_s = std::move(ready_s);
  return p;
}

PolicyOptions fusion(int64_t bytes) {
  PolicyOptions options;
  options.fusion_bytes = bytes;
  return options;
}

TEST(Dear, GroupsHoldAtMostTheFusionSizeAndAreCutFromTheEnd) {
  const Profile p = layers({0, 1, 2, 3, 4}, {9, 8, 7, 6, 5});
  EXPECT_EQ(ops_of(make_plan("dear", p, {}, fusion(80))), (Ops{{kScatter, {30, 50}},
                                                               {kScatter, {10, 30}},
                                                               {kScatter, {0, 10}},
                                                               {kGather, {0, 10}},
                                                               {kGather, {10, 30}},
                                                               {kGather, {30, 50}}}));
  EXPECT_EQ(fused_groups(p, 79).size(), 5u);
  EXPECT_EQ(fused_groups(p, 1).size(), 5u);
  EXPECT_EQ(fused_groups(p, 120).size(), 2u);
  EXPECT_EQ(fused_groups(p, 199).size(), 2u);
  EXPECT_EQ(fused_groups(p, 200).size(), 1u);
}

TEST(Dear, GroupsEndWhereTheDtypeDoes) {
  Profile p = layers({0, 1, 2, 3, 4}, {9, 8, 7, 6, 5});
  p.tensors[1].dtype = p.tensors[2].dtype = DType::int32;
  const std::vector<FusedGroup> groups = fused_groups(p, 1000);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].block, (Block{30, 50}));
  EXPECT_EQ(groups[1].block, (Block{10, 30}));
  EXPECT_EQ(groups[2].block, (Block{0, 10}));
}

TEST(Dear, ScattersAsGroupsFillAndGathersByFirstNeed) {
  const Profile p = layers({3, 4, 5, 1, 2, 2}, {1, 2, 6, 3, 5, 4});
  EXPECT_EQ(ops_of(make_plan("dear", p, {}, fusion(80))), (Ops{{kScatter, {0, 20}},
                                                               {kScatter, {40, 60}},
                                                               {kScatter, {20, 40}},
                                                               {kGather, {20, 40}},
                                                               {kGather, {40, 60}},
                                                               {kGather, {0, 20}}}));
}

TEST(DearExact, EqualsTheBestOfAllFusionSizes) {
  std::mt19937 rng(31);
  int better = 0;
  for (int i = 0; i < 400; ++i) {
    const Profile p = random_job(rng, uniform(rng, 1, 14), 1e7);
    const NetworkModel network = random_network(rng);
    PolicyOptions options = fusion(uniform(rng, 1, 50 << 20));
    options.overlap = uniform(rng, 0, 3) ? Overlap::forward : Overlap::backward;
    options.sharded = options.overlap == Overlap::forward && uniform(rng, 0, 1);
    Simulator simulator(p, network, options.overlap, options.sharded);
    const double dear_s = simulator.step_s(make_plan("dear", p, network, options));
    double least_s = dear_s;
    for (size_t begin = 0; begin < p.tensors.size(); ++begin) {
      int64_t size = 0;
      for (size_t end = begin; end < p.tensors.size(); ++end) {
        size += p.tensors[end].numel * itemsize(p.tensors[end].dtype);
        const Plan plan = dear_plan("dear", p, fused_groups(p, size));
        least_s = std::min(least_s, simulator.step_s(plan));
      }
    }
    const double exact_s = simulator.step_s(make_plan("dear_exact", p, network, options));
    EXPECT_NEAR(exact_s, least_s, 1e-9 * least_s) << i;
    better += exact_s < dear_s * (1 - 1e-6);
  }
  EXPECT_GT(better, 40);
}

TEST(DearExact, KeepsTheGivenSizeWhereNoneIsBetter) {
  const Profile p = layers({0, 1, 2, 3, 4}, {9, 8, 7, 6, 5});
  EXPECT_EQ(ops_of(make_plan("dear_exact", p, {}, fusion(80))),
            ops_of(make_plan("dear", p, {}, fusion(80))));
}

TEST(DearExact, IsNoWorseThanAnySizeOnLongJobs) {
  std::mt19937 rng(32);
  for (int i = 0; i < 6; ++i) {
    const Profile p = random_chain(rng, 300, 1e7);
    const NetworkModel network{8, {{5e-4, 8.6e-10}}};
    Simulator simulator(p, network, Overlap::forward);
    const double exact_s = simulator.step_s(make_plan("dear_exact", p, network));
    for (int k = 0; k < 300; ++k) {
      const auto size = static_cast<int64_t>(std::exp(uniform_real(rng, 0, 21)));
      EXPECT_LE(exact_s, simulator.step_s(dear_plan("dear", p, fused_groups(p, size))) + 1e-9);
    }
  }
}

TEST(PipeDap, GathersBehindTheScatterWhereIdleTimeAndAStartupHideHalfAnAllReduce) {
  // Halves of an all_reduce take 2.5 s (alpha 1, 40 bytes of 0.1); scatters end at 3.5, 6.5, 11.
  const Profile p = layers({0, 1, 2}, {8.5, 4, 1});
  const auto plan = [&](const Profile& job) {
    return ops_of(make_plan("pipedap", job, {2, {{1, 0.1}}}));
  };
  const Ops dear = {{kScatter, {20, 30}}, {kScatter, {10, 20}}, {kScatter, {0, 10}},
                    {kGather, {0, 10}},   {kGather, {10, 20}},  {kGather, {20, 30}}};
  // 0.5 + 1 s are too little; 2 + 1 s are enough.
  EXPECT_EQ(plan(p), (Ops{{kScatter, {20, 30}},
                          {kScatter, {10, 20}},
                          {kGather, {10, 20}},
                          {kScatter, {0, 10}},
                          {kGather, {0, 10}},
                          {kGather, {20, 30}}}));
  // 1.5 + 1 s are just not more than 2.5.
  EXPECT_EQ(plan(layers({0, 1, 2}, {8, 4, 1})), dear);
  EXPECT_EQ(plan(layers({0, 1, 2}, {10.4, 5.5, 1})), (Ops{{kScatter, {20, 30}},
                                                          {kGather, {20, 30}},
                                                          {kScatter, {10, 20}},
                                                          {kGather, {10, 20}},
                                                          {kScatter, {0, 10}},
                                                          {kGather, {0, 10}}}));
  // The first all_gather delays the second scatter and takes of the idle time behind it.
  EXPECT_EQ(plan(layers({0, 1, 2}, {9.9, 5.5, 1})).back(), (std::pair{kGather, Block{10, 20}}));
}

}  // namespace
}  // namespace usbyte
