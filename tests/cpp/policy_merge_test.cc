// SPDX-License-Identifier: Apache-2.0
// Policies that send whole tensors or fixed slices: MG-WFBP and P3.
#include <gtest/gtest.h>

#include "random_job.h"
#include "usbyte/policy.h"

namespace usbyte {
namespace {

std::vector<std::vector<Block>> ops_of(const Plan& plan) {
  std::vector<std::vector<Block>> out;
  for (const Op& op : plan.ops()) out.push_back(op.blocks);
  return out;
}

// Gradients 2 s apart, the last one first.
Profile layers(const std::vector<int64_t>& numels) {
  Profile p;
  int64_t offset = 0;
  for (size_t i = 0; i < numels.size(); ++i) {
    p.tensors.push_back({"t" + std::to_string(i), numels[i], DType::float32, offset});
    offset += numels[i];
    p.need_s.push_back(static_cast<double>(i));
    p.ready_s.push_back(2 * static_cast<double>(numels.size() - i));
  }
  return p;
}

// The merge rule as published: after each merge, all starts anew.
std::vector<std::vector<Block>> merged(const Profile& p, AlphaBeta cost) {
  const size_t count = p.tensors.size();
  std::vector<double> time_s(count), start_s(count);
  std::vector<int64_t> bytes;
  std::vector<bool> joins(count);  // the op of the tensor before it in the flat buffer
  for (const TensorSpec& t : p.tensors) bytes.push_back(4 * t.numel);
  for (size_t i = 0; i < count; ++i) time_s[i] = cost.time_s(bytes[i]);
  const auto restart = [&] {
    for (size_t i = count; i-- > 0;) {
      const double free_s = i + 1 < count ? start_s[i + 1] + time_s[i + 1] : 0;
      start_s[i] = std::max(free_s, p.ready_s[i]);
    }
  };
  restart();
  for (size_t l = count - 1; l > 0; --l) {
    const double ready_s = p.ready_s[l - 1];
    if (ready_s < start_s[l] + time_s[l] &&
        (start_s[l] > ready_s || ready_s - start_s[l] < cost.alpha_s)) {
      joins[l] = true;
      bytes[l - 1] += bytes[l];
      time_s[l - 1] = cost.time_s(bytes[l - 1]);
      time_s[l] = 0;
      restart();
    }
  }
  std::vector<std::vector<Block>> ops;
  for (size_t i = count; i-- > 0;) {
    const TensorSpec& t = p.tensors[i];
    if (i + 1 < count && joins[i + 1]) {
      ops.back().front().begin = t.offset;
    } else {
      ops.push_back({{t.offset, t.end()}});
    }
  }
  return ops;
}

TEST(MgWfbp, MergesAsPublished) {
  std::mt19937 rng(21);
  size_t ops = 0, tensors = 0;
  for (int i = 0; i < 2000; ++i) {
    const Profile p = random_chain(rng, uniform(rng, 1, 40), 1e8);
    const AlphaBeta cost{uniform_real(rng, 0, 0.1), uniform_real(rng, 0, 1e-8)};
    const Plan plan = make_plan("mgwfbp", p, {4, {cost}});
    ASSERT_EQ(ops_of(plan), merged(p, cost)) << i;
    for (const Op& op : plan.ops()) EXPECT_TRUE(op.fence);
    ops += plan.ops().size();
    tensors += p.tensors.size();
  }
  EXPECT_GT(ops, tensors / 10);
  EXPECT_LT(ops, tensors - tensors / 10);
}

TEST(MgWfbp, WaitsForLessThanAStartup) {
  // An op of 10 elements takes 1 s and a startup.
  const Profile p = layers({10, 10, 10});
  EXPECT_EQ(ops_of(make_plan("mgwfbp", p, {2, {{1.9, 1.0 / 40}}})),
            (std::vector<std::vector<Block>>{{{20, 30}}, {{0, 20}}}));
  EXPECT_EQ(ops_of(make_plan("mgwfbp", p, {2, {{2.1, 1.0 / 40}}})),
            (std::vector<std::vector<Block>>{{{0, 30}}}));
}

TEST(MgWfbp, BlocksOfOneOpAreJoinedWhereTheyAreNeighboursAndNeverMixDtypes) {
  Profile p = layers({10, 10, 10, 10});
  p.ready_s = {4, 1, 3, 2};  // backward: 1, 3, 2, 0
  const NetworkModel slow{2, {{100, 1}}};
  EXPECT_EQ(ops_of(make_plan("mgwfbp", p, slow)), (std::vector<std::vector<Block>>{{{0, 40}}}));
  p.ready_s = {200, 1, 201, 2};  // 1 and 3 go before 0 and 2 are ready
  EXPECT_EQ(ops_of(make_plan("mgwfbp", p, {2, {{100, 0}}})),
            (std::vector<std::vector<Block>>{{{10, 20}, {30, 40}}, {{0, 10}, {20, 30}}}));
  p.ready_s = {4, 1, 3, 2};
  p.tensors[3].dtype = DType::int32;
  EXPECT_EQ(ops_of(make_plan("mgwfbp", p, slow)),
            (std::vector<std::vector<Block>>{{{10, 20}}, {{30, 40}}, {{0, 10}, {20, 30}}}));
}

TEST(P3, SlicesAre40000ParametersAndTheRest) {
  const Plan plan = make_plan("p3", layers({40'000, 100'000}), {});
  EXPECT_EQ(ops_of(plan),
            (std::vector<std::vector<Block>>{
                {{40'000, 80'000}}, {{80'000, 120'000}}, {{120'000, 140'000}}, {{0, 40'000}}}));
}

TEST(P3, NearestInputOvertakesAndOneSliceGoesAtATime) {
  // A slice takes 1.6 s; tensor 1 is ready at 2, tensor 0 at 4.
  const Plan plan = make_plan("p3", layers({50'000, 160'000}), {2, {{0, 1e-5}, {0, 1e-9}}});
  EXPECT_EQ(ops_of(plan), (std::vector<std::vector<Block>>{{{50'000, 90'000}},
                                                           {{90'000, 130'000}},
                                                           {{0, 40'000}},
                                                           {{40'000, 50'000}},
                                                           {{130'000, 170'000}},
                                                           {{170'000, 210'000}}}));
  for (const Op& op : plan.ops()) EXPECT_TRUE(op.fence);
}

}  // namespace
}  // namespace usbyte
