// SPDX-License-Identifier: Apache-2.0
#include "plan/plan_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "mesh_rig.h"
#include "random_dimension_paths.h"
#include "random_plan.h"

namespace usbyte {
namespace {

std::vector<int> list(std::span<const int> items) { return {items.begin(), items.end()}; }

bool touches(const Op& op, const TensorSpec& tensor, int index) {
  if (op.sparse) return op.sparse->tensor == index;
  return std::ranges::any_of(
      op.blocks, [&](Block b) { return b.begin < tensor.end() && tensor.offset < b.end; });
}

bool sums_shards(const Op& op) { return op.kind == Collective::all_reduce && op.dimension >= 0; }

// Compares each list with what the definitions say, op by op.
void check(const Plan& plan) {
  const PlanIndex index(plan);
  const int tensors = static_cast<int>(plan.tensors().size());
  const int ops = static_cast<int>(plan.ops().size());
  const auto op_at = [&](int i) -> const Op& { return plan.ops()[static_cast<size_t>(i)]; };
  const auto touched = [&](int op, int t) {
    return touches(op_at(op), plan.tensors()[static_cast<size_t>(t)], t);
  };
  std::vector<std::vector<int>> followers(static_cast<size_t>(ops));
  for (int op = 0; op < ops; ++op) {
    std::vector<int> expected;
    for (int t = 0; t < tensors; ++t) {
      if (touched(op, t)) expected.push_back(t);
    }
    EXPECT_EQ(list(index.tensors_of(op)), expected) << plan.describe(op);
    std::set<int> before;
    const bool follows = op_at(op).kind == Collective::all_gather || sums_shards(op_at(op));
    for (Block b : follows ? op_at(op).blocks : std::vector<Block>()) {
      for (int other = op - 1; other >= 0; --other) {
        const Op& its = op_at(other);
        if (its.kind != Collective::reduce_scatter && !sums_shards(its)) continue;
        if (std::ranges::find(its.blocks, b) == its.blocks.end()) continue;
        before.insert(other);
        break;
      }
    }
    EXPECT_EQ(list(index.follows(op)), std::vector(before.begin(), before.end()))
        << plan.describe(op);
    for (int other : before) followers[static_cast<size_t>(other)].push_back(op);
  }
  std::vector<std::set<int>> brought_by;
  for (int t = 0; t < tensors; ++t) {
    std::vector<int> sent, brought;
    for (int op = 0; op < ops; ++op) {
      const Op& its = op_at(op);
      if (!touched(op, t)) continue;
      if (its.kind != Collective::all_gather && !sums_shards(its)) sent.push_back(op);
      if (its.kind != Collective::reduce_scatter && !sums_shards(its)) brought.push_back(op);
    }
    EXPECT_EQ(list(index.sent_by(t)), sent);
    EXPECT_EQ(list(index.brought_by(t)), brought);
    brought_by.emplace_back(brought.begin(), brought.end());
  }
  for (int op = 0; op < ops; ++op) {
    EXPECT_EQ(list(index.followers_of(op)), followers[static_cast<size_t>(op)]);
  }
  const CoArriving found = co_arriving(plan);
  for (size_t t = 0; t < brought_by.size(); ++t) {
    std::vector<int> expected;
    for (size_t other = 0; other < brought_by.size(); ++other) {
      if (std::ranges::includes(brought_by[t], brought_by[other])) {
        expected.push_back(static_cast<int>(other));
      }
    }
    EXPECT_EQ(found.tensors[static_cast<size_t>(found.group_of[t])], expected);
    for (size_t other = 0; other < brought_by.size(); ++other) {
      EXPECT_EQ(found.group_of[t] == found.group_of[other], brought_by[t] == brought_by[other]);
    }
  }
}

TEST(PlanIndex, AgreesWithTheDefinitionsOnRandomPlans) {
  std::mt19937 rng(1);
  for (int i = 0; i < cases(1000); ++i) {
    check(random_plan(rng));
    if (HasFailure()) return;
  }
}

TEST(PlanIndex, AgreesWithTheDefinitionsAlongDimensions) {
  test::Random random(2);
  const std::vector<std::string> codecs = {"none", "fp16", "topk:0.5"}, gathers = {"fp16"};
  for (int i = 0; i < cases(300); ++i) {
    for (const std::vector<int>& sizes : test::kLineMeshes) {
      check(test::random_lines(random, test::mesh(sizes), codecs, gathers));
      if (HasFailure()) return;
    }
  }
}

TEST(PlanIndex, KnowsSparseTensors) {
  const std::vector<TensorSpec> tensors = {{"a", 8, DType::float32, 0},
                                           {"rows", 0, DType::float32, 8, 4, 2}};
  const Plan plan("test", tensors,
                  {{Collective::sparse_all_reduce, {}, 64, false, "none", SparseAllReduceSpec{1}},
                   {Collective::all_reduce, {{0, 8}}, 64, false}});
  check(plan);
  EXPECT_EQ(list(PlanIndex(plan).brought_by(1)), std::vector{0});
}

}  // namespace
}  // namespace usbyte
