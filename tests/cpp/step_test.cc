// SPDX-License-Identifier: Apache-2.0
#include "plan/step.h"

#include <gtest/gtest.h>

namespace usbyte {
namespace {

std::vector<int> list(std::span<const int> items) { return {items.begin(), items.end()}; }

// Tensors "a" and "b" of 8 float32 elements each.
const std::vector<TensorSpec> kTensors = {{"a", 8, DType::float32, 0}, {"b", 8, DType::float32, 8}};

TEST(Step, IsOverBeforeItBegins) {
  const Plan plan("test", kTensors, {{Collective::all_reduce, {{0, 16}}, 64, false}});
  const Step step(plan);
  EXPECT_TRUE(step.drained());
  EXPECT_FALSE(step.launchable());
  EXPECT_TRUE(step.arrived(0) && step.arrived(1));
}

TEST(Step, LaunchesInPlanOrderAsInputsAndTheWindowAllow) {
  // The second op spans both tensors and is larger than its window.
  const Plan plan("test", kTensors,
                  {{Collective::all_reduce, {{12, 16}}, 64, false},
                   {Collective::all_reduce, {{4, 12}}, 16, false},
                   {Collective::all_reduce, {{0, 4}}, 64, true}});
  Step step(plan);
  for (int round = 0; round < 2; ++round) {
    step.begin();
    EXPECT_EQ(list(step.ready(0).queued), std::vector{2});
    EXPECT_FALSE(step.launchable());  // op 2 must not overtake
    EXPECT_EQ(list(step.ready(1).queued), (std::vector{0, 1}));
    EXPECT_EQ(step.launch(), 0);
    EXPECT_FALSE(step.launchable());
    EXPECT_TRUE(list(step.complete(0).arrived).empty());
    EXPECT_EQ(step.launch(), 1);
    EXPECT_FALSE(step.launchable());  // the fence
    EXPECT_EQ(list(step.complete(1).arrived), std::vector{1});
    EXPECT_EQ(step.launch(), 2);
    EXPECT_EQ(step.in_flight(), 1);
    EXPECT_FALSE(step.drained() || step.arrived(0));
    EXPECT_EQ(list(step.complete(2).arrived), std::vector{0});
    EXPECT_TRUE(step.drained() && step.arrived(0));
  }
}

TEST(Step, AnAllGatherWaitsForEveryScatterOfItsBlocks) {
  const Plan plan("test", kTensors,
                  {{Collective::reduce_scatter, {{8, 16}}, 64, false},
                   {Collective::reduce_scatter, {{0, 8}}, 64, false},
                   {Collective::all_gather, {{0, 8}, {8, 16}}, 64, false}});
  Step step(plan);
  step.begin();
  step.ready(1);
  step.ready(0);
  EXPECT_EQ(step.launch(), 0);
  EXPECT_EQ(step.launch(), 1);
  EXPECT_FALSE(step.launchable());
  EXPECT_TRUE(list(step.complete(1).queued).empty());
  EXPECT_EQ(list(step.complete(0).queued), std::vector{2});
  EXPECT_EQ(step.launch(), 2);
  EXPECT_EQ(list(step.complete(2).arrived), (std::vector{0, 1}));
}

TEST(Step, HeldGathersWaitForTheirRelease) {
  const Plan plan("test", kTensors,
                  {{Collective::reduce_scatter, {{0, 16}}, 64, false},
                   {Collective::all_gather, {{0, 16}}, 64, false}});
  Step step(plan, true);
  for (int round = 0; round < 2; ++round) {
    step.begin();
    step.ready(0);
    step.ready(1);
    EXPECT_FALSE(step.reduced());
    EXPECT_TRUE(list(step.complete(step.launch()).queued).empty());
    EXPECT_TRUE(step.reduced());
    EXPECT_FALSE(step.launchable());
    EXPECT_EQ(list(step.release_gathers().queued), std::vector{1});
    EXPECT_EQ(list(step.complete(step.launch()).arrived), (std::vector{0, 1}));
  }
}

TEST(Step, AFailedOpReturnsItsCreditAndNothingElse) {
  const Plan plan("test", kTensors, {{Collective::all_reduce, {{0, 16}}, 64, false}});
  Step step(plan);
  step.begin();
  step.ready(0);
  step.ready(1);
  step.launch();
  step.fail(0);
  EXPECT_EQ(step.in_flight(), 0);
  EXPECT_FALSE(step.drained() || step.arrived(0));
}

}  // namespace
}  // namespace usbyte
