// SPDX-License-Identifier: Apache-2.0
#include "usbyte/simulator.h"

#include <gtest/gtest.h>

#include <cmath>

#include "random_plan.h"
#include "random_profile.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"

namespace usbyte {
namespace {

constexpr int64_t kUnlimited = 1 << 30;

// Forward 0-3 s, backward 3-9 s, updates 9-10 s. Tensor i of 10 bytes is needed at i.
Profile three_layers() {
  Profile p;
  for (int64_t i = 0; i < 3; ++i) {
    p.tensors.push_back({std::string(1, static_cast<char>('a' + i)), 10, DType::uint8, 10 * i});
  }
  p.need_s = {0, 1, 2};
  p.ready_s = {9, 7, 5};
  p.step_s = 10;
  return p;
}

Plan one_each(const Profile& p, int64_t window, bool fence = false) {
  std::vector<Op> ops;
  for (int64_t begin : {20, 10, 0}) {
    ops.push_back({Collective::all_reduce, {{begin, begin + 10}}, window, fence});
  }
  return Plan("test", p.tensors, ops);
}

TEST(Simulator, OneOpAtATime) {
  const Profile p = three_layers();
  const NetworkModel network{2, {{1, 0.1}}};  // 2 s for 10 bytes
  Simulator forward(p, network, Overlap::forward);
  const Plan plan = one_each(p, kUnlimited, true);
  const Prediction predicted = forward.predict(plan);
  EXPECT_EQ(predicted.arrived_s, (std::vector<double>{11, 9, 7}));
  EXPECT_EQ(predicted.step_s, 11);  // only "a" is late, by a second
  EXPECT_EQ(predicted.record.launched_s, (std::vector<double>{5, 7, 9}));
  ASSERT_EQ(predicted.record.waits.size(), 1);
  EXPECT_EQ(predicted.record.waits[0].first, 0);
  EXPECT_EQ(predicted.record.waits[0].second, std::pair(10.0, 11.0));
  EXPECT_EQ(forward.step_s(plan), 11);
  EXPECT_EQ(forward.end_s(), 11);
  // Backward ends at 9, and waits for all.
  EXPECT_EQ(Simulator(p, network, Overlap::backward).step_s(plan), 12);
}

TEST(Simulator, OpsOfSeveralBlocksAreOfPackedBytes) {
  const Profile p = three_layers();
  NetworkModel network{2, {{1, 0.1}}};
  network.pack_s_per_byte = 0.05;
  const auto ends_s = [&](const std::vector<std::vector<int>>& ops) {
    std::vector<Op> all;
    for (const std::vector<int>& tensors : ops) {
      all.push_back({Collective::all_reduce, {}, kUnlimited});
      for (int t : tensors) {
        const TensorSpec& spec = p.tensors[static_cast<size_t>(t)];
        all.back().blocks.push_back({spec.offset, spec.end()});
      }
    }
    Simulator simulator(p, network, Overlap::backward);
    simulator.predict(Plan("test", p.tensors, all));
    return simulator.end_s();
  };
  // "a" is ready at 9: its 10 bytes take 2 s alone, 3 s with as many others, and 1 s to pack.
  EXPECT_EQ(ends_s({{2}, {1}, {0}}), 11);
  EXPECT_EQ(ends_s({{1}, {0, 2}}), 9 + 3 + 1);
}

TEST(Simulator, StartupsOverlapWithinTheWindow) {
  Profile p = three_layers();
  p.ready_s = {5, 5, 5};
  const NetworkModel network{2, {{1, 0.1}, {2, 0.2}}};
  // Two ops fit: the first two are launched at 5 with 1 and 2 in flight, the third at 7.
  Simulator simulator(p, network, Overlap::backward);
  EXPECT_EQ(simulator.predict(one_each(p, 20)).arrived_s, (std::vector<double>{11, 9, 7}));
  EXPECT_EQ(simulator.predict(one_each(p, 20)).record.launched_s, (std::vector<double>{5, 5, 7}));
  // What goes beyond the measured windows costs as the last.
  EXPECT_EQ(simulator.predict(one_each(p, kUnlimited)).record.launched_s,
            (std::vector<double>{5, 5, 5}));
}

TEST(Simulator, SerialStartupsTakeTurns) {
  Profile p = three_layers();
  p.ready_s = {5, 5, 5};
  NetworkModel network{2, {{1, 0.1}}};
  Simulator overlapping(p, network, Overlap::backward);
  EXPECT_EQ(overlapping.predict(one_each(p, kUnlimited)).arrived_s, (std::vector<double>{9, 9, 9}));
  network.concurrent = 1;
  Simulator serial(p, network, Overlap::backward);
  EXPECT_EQ(serial.predict(one_each(p, kUnlimited)).arrived_s, (std::vector<double>{11, 9, 7}));
  // Then a window is worth no more than a fence before each op.
  EXPECT_EQ(serial.step_s(one_each(p, kUnlimited)), serial.step_s(one_each(p, 10, true)));
  EXPECT_EQ(serial.bytes_bound_s(), overlapping.bytes_bound_s());
}

TEST(Simulator, GathersFollowTheirScatters) {
  const Profile p = three_layers();
  const Plan plan("test", p.tensors,
                  {{Collective::reduce_scatter, {{10, 30}}, kUnlimited, false},
                   {Collective::reduce_scatter, {{0, 10}}, kUnlimited, false},
                   {Collective::all_gather, {{0, 10}}, kUnlimited, false},
                   {Collective::all_gather, {{10, 30}}, kUnlimited, false}});
  // Half of an all_reduce each: 1 s for 20 bytes, half a second for 10. Both gathers begin at 9.5
  // and share the channel.
  Simulator simulator(p, {2, {{0, 0.1}}}, Overlap::forward);
  EXPECT_EQ(simulator.predict(plan).arrived_s, (std::vector<double>{10.5, 11, 11}));
  EXPECT_EQ(simulator.step_s(plan), 10.5);
}

TEST(Simulator, SparseOpsTakeWhatGathersOfTheirBytesDo) {
  Profile p = three_layers();
  p.tensors.push_back({"words", 0, DType::float32, 30, 1000, 8});
  p.need_s.push_back(0);
  p.ready_s.push_back(9);
  Op op{Collective::sparse_all_reduce, {}, kUnlimited, false};
  op.sparse = {3, "zen", 10};
  const Plan plan("test", p.tensors, {{Collective::all_reduce, {{0, 30}}, kUnlimited, false}, op});
  // The dense op is launched at 9 with 30 elements, which take as many seconds alone; 10 bytes from
  // one of two ranks are a gather of 20, which takes 10 s alone.
  Simulator simulator(p, {2, {{0, 1}}}, Overlap::forward);
  const double dense_s = 30.0 * static_cast<double>(itemsize(p.tensors[0].dtype));
  const std::vector<double> arrived = simulator.predict(plan).arrived_s;
  EXPECT_EQ(arrived[3], 9 + 2 * 10);
  EXPECT_EQ(arrived[0], 9 + dense_s + 10);
  // The bound does not count what sparse gradients send.
  EXPECT_EQ(simulator.bytes_bound_s(),
            Simulator(three_layers(), {2, {{0, 1}}}, Overlap::forward).bytes_bound_s());
  const Profile again = Profile::from_json(p.to_json());
  EXPECT_EQ(again.tensors, p.tensors);
  EXPECT_TRUE(again.tensors.back().sparse());
}

TEST(Simulator, UpdatesRunAtTheGates) {
  Profile p = three_layers();
  p.update_s = 3;  // 1 s for each tensor; the forward pass begins at 7
  const std::vector<double> due = due_times(p, Overlap::forward);
  EXPECT_EQ(due, (std::vector<double>{7, 9, 11}));
  EXPECT_EQ(due_times(p, Overlap::backward), std::vector<double>(3, 9));
}

TEST(Simulator, ShardsAreUpdatedBetweenScatterAndGather) {
  Profile p = three_layers();  // updates take 1 s, half of that on each of two ranks
  p.update_s = 1;
  const Plan plan("test", p.tensors,
                  {{Collective::reduce_scatter, {{10, 30}}, kUnlimited, false},
                   {Collective::reduce_scatter, {{0, 10}}, kUnlimited, false},
                   {Collective::all_gather, {{0, 10}}, kUnlimited, false},
                   {Collective::all_gather, {{10, 30}}, kUnlimited, false}});
  // Scatters end at 8 and 10, one second after backward. The update ends at 10.5, when the forward
  // pass asks for the first parameter, which is there at 12.5; the others are at 13.5, one of them
  // due at 11.5.
  Simulator simulator(p, {2, {{0, 0.2}}}, Overlap::forward, true);
  EXPECT_EQ(simulator.predict(plan).arrived_s, (std::vector<double>{12.5, 13.5, 13.5}));
  EXPECT_EQ(simulator.lateness_s(plan), 3);
  EXPECT_EQ(simulator.step_s(plan), 12.5);
  EXPECT_GE(simulator.step_s(plan), simulator.bytes_bound_s());
  EXPECT_THROW(Simulator(p, {2, {{0, 0.2}}}, Overlap::backward, true), UsageError);
}

TEST(Simulator, RefusesAnotherJobsPlan) {
  const Profile p = three_layers();
  const NetworkModel network;
  Simulator simulator(p, network, Overlap::forward);
  EXPECT_THROW(simulator.step_s(Plan()), UsageError);
}

// With the channel free to switch at any byte, each instant goes to the earliest due date.
double bound_by_small_steps(const Profile& p, double s_per_byte, const std::vector<double>& due) {
  std::vector<double> rest;
  for (const TensorSpec& t : p.tensors) {
    rest.push_back(static_cast<double>(t.numel * itemsize(t.dtype)) * s_per_byte);
  }
  double delay = 0;
  constexpr double kTick = 1.0 / 64;
  for (double now = 0;; now += kTick) {
    int chosen = -1;
    bool left = false;
    for (size_t i = 0; i < rest.size(); ++i) {
      left |= rest[i] > 0;
      if (rest[i] <= 0 || p.ready_s[i] > now) continue;
      if (chosen < 0 || due[i] < due[static_cast<size_t>(chosen)]) chosen = static_cast<int>(i);
    }
    if (!left) return p.iteration_s() + delay;
    if (chosen < 0) continue;
    const size_t c = static_cast<size_t>(chosen);
    rest[c] -= kTick;
    if (rest[c] <= 0) delay = std::max(delay, now + kTick - due[c]);
  }
}

TEST(Simulator, BoundIsPreemptiveEarliestDueDate) {
  std::mt19937 rng(5);
  for (int i = 0; i < 300; ++i) {
    const Profile p = random_profile(rng);  // times and transfers are whole ticks
    const NetworkModel network{4, {{3, 0.25}}};
    for (Overlap overlap : {Overlap::backward, Overlap::forward}) {
      const std::vector<double> due = due_times(p, overlap);
      EXPECT_NEAR(Simulator(p, network, overlap).bytes_bound_s(),
                  bound_by_small_steps(p, 0.25, due), 1e-9);
    }
  }
}

TEST(Simulator, NoPlanGoesBelowTheBound) {
  std::mt19937 rng(11);
  for (int i = 0; i < 500; ++i) {
    const Profile p = random_profile(rng);
    const double alpha = static_cast<double>(uniform(rng, 0, 3));
    NetworkModel network{
        static_cast<int>(uniform(rng, 2, 6)),
        {{alpha, 0.25, alpha * static_cast<double>(uniform(rng, 0, 2)) / 2}, {2, 0.5, 1}}};
    network.concurrent = static_cast<int>(uniform(rng, 0, 3));
    network.busy_alpha_s = static_cast<double>(uniform(rng, 0, 4));
    network.pack_s_per_byte = 0.125 * static_cast<double>(uniform(rng, 0, 4));
    network.one_shot = {uniform(rng, 0, 20), static_cast<double>(uniform(rng, 0, 3)),
                        static_cast<double>(uniform(rng, 0, 2)),
                        static_cast<double>(uniform(rng, 0, 5))};
    for (Overlap overlap : {Overlap::backward, Overlap::forward}) {
      Simulator simulator(p, network, overlap);
      const Plan plan = random_plan(rng, p.tensors);
      const double step = simulator.step_s(plan);
      EXPECT_TRUE(std::isfinite(step));
      EXPECT_GE(step, simulator.bound_s() - 1e-9);
      EXPECT_GE(simulator.bound_s(), simulator.bytes_bound_s());
      EXPECT_GE(step, p.iteration_s());
    }
  }
}

// The bound counts no startup for a sparse gradient. This one is ready at the end of backward, 7 s
// after the dense gradient, whose 4 bytes take 4 s.
TEST(Simulator, TheBoundHasNoStartupOfSparseGradients) {
  Profile p;
  p.tensors = {{"a", 1, DType::float32, 0}, {"words", 0, DType::float32, 1, 1000, 8}};
  p.need_s = {0, 0};
  p.ready_s = {1, 8};
  p.step_s = 8;
  EXPECT_EQ(Simulator(p, {4, {{2, 1}}}, Overlap::backward).bound_s(), 8);
  p.tensors[1] = {"b", 1, DType::float32, 1};
  EXPECT_EQ(Simulator(p, {4, {{2, 1}}}, Overlap::backward).bound_s(), 13);
}

// One gradient, ready after 6 s of an iteration that ends then; its 4 bytes take 4 s.
TEST(Simulator, TheBoundHasOneStartup) {
  Profile p;
  p.tensors = {{"a", 1, DType::float32, 0}};
  p.need_s = {0};
  p.ready_s = {6};
  p.step_s = 6;
  const auto bounds = [&](const NetworkModel& network) {
    const Simulator simulator(p, network, Overlap::backward);
    return std::pair(simulator.bytes_bound_s(), simulator.bound_s());
  };
  EXPECT_EQ(bounds({4, {{0, 1}}}), std::pair(10.0, 10.0));
  // A scatter's startup, half of an all_reduce's, before the first byte.
  EXPECT_EQ(bounds({4, {{2, 1}}}), std::pair(10.0, 11.0));
  EXPECT_EQ(bounds({4, {{2, 1, 2}}}), std::pair(10.0, 10.0));    // bytes flow at once
  EXPECT_EQ(bounds({4, {{20, 1, 20}}}), std::pair(10.0, 26.0));  // the whole op
  NetworkModel network{4, {{20, 1}}};
  network.one_shot = {100, 7, 1};
  EXPECT_EQ(bounds(network), std::pair(10.0, 13.0));
  const NetworkModel split{4, {{20, 1}}, {{1, 0.5}}, {{2, 0.5}}};
  EXPECT_EQ(bounds(split), std::pair(10.0, 11.0));
  // Sharded: both startups, one after the other.
  const Simulator sharded(p, split, Overlap::forward, true);
  EXPECT_EQ(sharded.bytes_bound_s(), 10);
  EXPECT_EQ(sharded.bound_s(), 13);
}

TEST(Simulator, ABoundThatNeverEndsIsAnError) {
  const NetworkModel network{4, {{0, 1e300}}};
  Profile p = three_layers();
  for (TensorSpec& t : p.tensors) t.numel = 1'000'000'000;
  for (size_t i = 1; i < p.tensors.size(); ++i) p.tensors[i].offset = p.tensors[i - 1].end();
  for (bool sharded : {false, true}) {
    const Simulator simulator(p, network, Overlap::forward, sharded);
    EXPECT_THROW(simulator.bytes_bound_s(), UsageError);
    EXPECT_THROW(simulator.bound_s(), UsageError);
  }
}

}  // namespace
}  // namespace usbyte
