// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "random_job.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

struct Window {
  double start_s, end_s;
  std::vector<size_t> ops;
};

// A fence begins a window.
std::vector<Window> windows_of(const Plan& plan, const StepRecord& record) {
  std::vector<Window> windows;
  for (size_t i = 0; i < plan.ops().size(); ++i) {
    if (plan.ops()[i].fence) windows.push_back({record.launched_s[i], 0, {}});
    EXPECT_EQ(record.launched_s[i], windows.back().start_s) << "not posted with its window";
    windows.back().end_s = std::max(windows.back().end_s, record.done_s[i]);
    windows.back().ops.push_back(i);
  }
  return windows;
}

PolicyOptions units(int64_t bytes) {
  PolicyOptions options;
  options.unit_bytes = bytes;
  return options;
}

TEST(DCredit, WindowsFillTheirIntervalsUpToAUnit) {
  std::mt19937 rng(51);
  int several = 0, full = 0;
  for (int i = 0; i < 2000; ++i) {
    const Profile p = random_job(rng, uniform(rng, 1, 20), 1e6);
    const AlphaBeta cost{uniform_real(rng, 0, 0.1), std::exp(uniform_real(rng, -20, -13))};
    const PolicyOptions options = units(uniform(rng, 1, 1 << 16));
    const Plan plan = make_plan("dcredit", p, {4, {cost}}, options);
    const StepRecord record = Simulator(p, {4, {cost}}, options.overlap).predict(plan).record;
    std::vector<double> ready_s = p.ready_s;
    std::sort(ready_s.begin(), ready_s.end());
    std::vector<int64_t> left;
    for (const TensorSpec& t : p.tensors) left.push_back(t.numel * itemsize(t.dtype));
    for (const Window& w : windows_of(plan, record)) {
      several += w.ops.size() > 1;
      int64_t bytes = 0;
      for (size_t op : w.ops) {
        bytes += plan.bytes(plan.ops()[op]);
        left[static_cast<size_t>(plan.tensors_of(plan.ops()[op]).front())] -=
            plan.bytes(plan.ops()[op]);
      }
      for (size_t op : w.ops) EXPECT_EQ(plan.ops()[op].window_bytes, bytes);
      EXPECT_NEAR(w.end_s - w.start_s, cost.time_s(bytes), 1e-9 * w.end_s) << "shares one startup";
      const auto next = std::upper_bound(ready_s.begin(), ready_s.end(), w.start_s);
      if (next == ready_s.end()) {
        EXPECT_EQ(w.ops.size(), 1u) << "after backward";
        continue;
      }
      const Op& last = plan.ops()[w.ops.back()];
      const size_t tensor = static_cast<size_t>(plan.tensors_of(last).front());
      const int64_t size = itemsize(p.tensors[tensor].dtype);
      const int64_t unit = std::max<int64_t>(options.unit_bytes / size, 1) * size;
      if (left[tensor] > 0) {
        EXPECT_EQ(plan.bytes(last) % unit, 0);
      }
      const double room_s = *next - w.start_s;
      if (bytes > unit) {
        EXPECT_LT(cost.time_s(bytes - unit), room_s * (1 + 1e-9)) << "overfilled";
      }
      if (w.end_s < *next) {  // nothing that was ready may be left
        for (size_t t = 0; t < left.size(); ++t) {
          EXPECT_TRUE(left[t] == 0 || p.ready_s[t] > w.start_s);
        }
      } else {
        ++full;
      }
    }
  }
  EXPECT_GT(several, 500);
  EXPECT_GT(full, 500);
}

// Where ops start up in turn, a window that is to share a startup is one op.
TEST(DCredit, WindowsShareAStartupOnSerialNetworksToo) {
  std::mt19937 rng(52);
  int joint = 0;
  for (int i = 0; i < 300; ++i) {
    const Profile p = random_chain(rng, uniform(rng, 1, 20), 1e6);
    const AlphaBeta cost{uniform_real(rng, 0, 0.1), std::exp(uniform_real(rng, -20, -13))};
    const PolicyOptions options = units(uniform(rng, 1, 1 << 16));
    const NetworkModel free{4, {cost}};
    NetworkModel serial = free;
    serial.concurrent = 1;
    const Plan apart = make_plan("dcredit", p, free, options);
    const Plan plan = make_plan("dcredit", p, serial, options);
    joint += plan.ops().size() < apart.ops().size();
    const double step_s = Simulator(p, free, options.overlap).step_s(apart);
    EXPECT_NEAR(Simulator(p, serial, options.overlap).step_s(plan), step_s, 1e-9 * step_s);
    // Not where packing takes longer than all startups.
    serial.pack_s_per_byte = 1;
    const Plan costly = make_plan("dcredit", p, serial, options);
    for (const Op& op : costly.ops()) EXPECT_EQ(op.blocks.size(), 1u);
  }
  EXPECT_GT(joint, 100);
}

TEST(DCredit, WindowsByHand) {
  // Units of 1 s, startup 1 s. Until 6 all of d. From 6 to 6.5, less than a startup, one unit of c,
  // until 8. So nothing from 6.5 to 7; then what is left of each tensor.
  Profile p;
  p.tensors = {{"a", 10, DType::float32, 0},
               {"b", 20, DType::float32, 10},
               {"c", 30, DType::float32, 30},
               {"d", 20, DType::float32, 60}};
  p.need_s = {0, 1, 2, 3};
  p.ready_s = {7, 6.5, 6, 0};
  const Plan plan = make_plan("dcredit", p, {2, {{1, 1.0 / 40}}}, units(40));
  std::vector<Block> blocks;
  for (const Op& op : plan.ops()) blocks.push_back(op.blocks.front());
  EXPECT_EQ(blocks, (std::vector<Block>{{60, 80}, {30, 40}, {0, 10}, {10, 30}, {40, 60}}));
  for (const Op& op : plan.ops()) EXPECT_TRUE(op.fence);
  // With an interval of 4.5 s, a window holds all of c and, rounded up, one unit of d.
  p.ready_s = {9, 4.5, 0, 0};
  const Plan shared = make_plan("dcredit", p, {2, {{1, 1.0 / 40}}}, units(40));
  ASSERT_GE(shared.ops().size(), 2u);
  EXPECT_EQ(shared.ops()[0].blocks.front(), (Block{30, 60}));
  EXPECT_EQ(shared.ops()[1].blocks.front(), (Block{60, 70}));
  EXPECT_EQ(shared.ops()[0].window_bytes, 160);
  EXPECT_TRUE(shared.ops()[0].fence);
  EXPECT_FALSE(shared.ops()[1].fence);
}

}  // namespace
}  // namespace usbyte
