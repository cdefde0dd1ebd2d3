// SPDX-License-Identifier: Apache-2.0
// Properties of the engine on random plans: results, order, admission, and long runs.

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <numeric>

#include "comm/local_communicator.h"
#include "communicators.h"
#include "plan/step.h"
#include "random_training.h"
#include "usbyte/engine.h"

namespace usbyte {
namespace {

using test::expect_sum;
using test::on_each_rank;
using test::Random;
using test::write_gradient;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// A hang becomes a failure.
EngineOptions impatient() {
  EngineOptions options;
  options.stall_limit_s = 60;
  return options;
}

std::vector<int> random_order(Random& random, size_t n) {
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random.engine());
  return order;
}

// One rank's training: gradients appear in any order, from one or two threads; then the next
// forward pass waits for the tensors in any order.
void train(const Plan& plan, Communicator& network, bool late, uint64_t seed, int64_t steps) {
  Random random(seed + static_cast<uint64_t>(network.rank()));
  std::unique_ptr<Communicator> delay;
  if (late) delay = std::make_unique<test::LateCommunicator>(network, seed);
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  test::RuleChecker checker(plan, flat_buffer.data(), delay ? *delay : network);
  Engine engine(plan, flat_buffer.data(), checker, impatient());
  for (int64_t step = 1; step <= steps; ++step) {
    checker.begin_step();
    engine.begin_step();
    const std::vector<int> order = random_order(random, plan.tensors().size());
    const auto produce = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        write_gradient(plan, flat_buffer.data(), order[i], network.rank(), step);
        checker.ready(order[i]);
        engine.ready(order[i]);
      }
    };
    const size_t half = random.one_in(2) ? order.size() / 2 : order.size();
    std::thread other(produce, half, order.size());
    produce(0, half);
    other.join();
    engine.end_backward();
    if (!random.one_in(3)) {
      for (int tensor : random_order(random, plan.tensors().size())) {
        engine.wait(tensor);
        expect_sum(plan, flat_buffer.data(), tensor, network.size(), step);
      }
    }
    engine.drain();
    for (int tensor : order) expect_sum(plan, flat_buffer.data(), tensor, network.size(), step);
    for (auto [launched, done] : engine.op_times()) EXPECT_GE(done, launched);
  }
  EXPECT_EQ(engine.steps(), steps);
}

class RandomPlans : public testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Engine, RandomPlans, testing::Range<uint64_t>(0, 40));

TEST_P(RandomPlans, TrainOnSumsAndKeepTheRules) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = test::regather(random_plan(random.engine()), random);
  const int size = static_cast<int>(2 + seed % 7);
  const AlphaBeta cost = seed % 2 ? AlphaBeta{2e-4, 1e-9} : AlphaBeta{};
  auto ranks = make_local_communicators(size, cost);
  on_each_rank(size, [&](int rank) {
    train(plan, *ranks[static_cast<size_t>(rank)], seed % 3 != 0, 1000 * seed, 4);
  });
}

// With completions in the test's hand, the engine launches exactly what a model of the rules says.
TEST_P(RandomPlans, LaunchAsSoonAsTheRulesAllow) {
  const uint64_t seed = GetParam();
  Random random(seed + 500);
  const Plan plan = test::regather(random_plan(random.engine()), random);
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  test::ManualCommunicator manual;
  test::RuleChecker checker(plan, flat_buffer.data(), manual);
  Engine engine(plan, flat_buffer.data(), checker, impatient());
  const int ops = static_cast<int>(plan.ops().size());
  for (int step = 0; step < 2; ++step) {
    checker.begin_step();
    engine.begin_step();
    std::vector<int> unready = random_order(random, plan.tensors().size());
    std::set<int> ready;
    std::set<Block> scattered;
    std::vector<int> in_flight;
    Admission admission;
    int launched = 0;
    const auto launchable = [&] {
      if (launched == ops) return false;
      const Op& op = plan.ops()[static_cast<size_t>(launched)];
      const std::vector<int> tensors = plan.tensors_of(op);
      return std::all_of(tensors.begin(), tensors.end(),
                         [&](int t) { return ready.contains(t); }) &&
             (op.kind != Collective::all_gather ||
              std::all_of(op.blocks.begin(), op.blocks.end(),
                          [&](Block b) { return scattered.contains(b); })) &&
             admission.admits(op, plan.bytes(op));
    };
    while (launched < ops || !in_flight.empty()) {
      if (!unready.empty() && (in_flight.empty() || random.one_in(2))) {
        ready.insert(unready.back());
        checker.ready(unready.back());
        engine.ready(unready.back());
        unready.pop_back();
        if (unready.empty()) engine.end_backward();
      } else {
        std::swap(
            in_flight[static_cast<size_t>(random(0, static_cast<int64_t>(in_flight.size()) - 1))],
            in_flight.back());
        const Op& op = plan.ops()[static_cast<size_t>(in_flight.back())];
        admission.completed(plan.bytes(op));
        if (op.kind == Collective::reduce_scatter) {
          scattered.insert(op.blocks.begin(), op.blocks.end());
        }
        manual.complete(step * ops + in_flight.back());
        in_flight.pop_back();
      }
      for (; launchable(); ++launched) {
        admission.launched(plan.bytes(plan.ops()[static_cast<size_t>(launched)]));
        in_flight.push_back(launched);
      }
      ASSERT_TRUE(manual.await_launches(step * ops + launched)) << engine.status();
      ASSERT_EQ(manual.launched(), step * ops + launched) << engine.status();
    }
    engine.drain();
  }
}

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(EngineLongRun, TenThousandStepsNeitherDriftNorLeak) {
  constexpr int kSize = 2;
  constexpr int64_t kTensors = 200, kNumel = 16;
  const int64_t steps = kSanitized ? 500 : 10'000;
  std::vector<TensorSpec> tensors;
  std::vector<Op> ops;
  for (int64_t t = 0; t < kTensors; ++t) {
    tensors.push_back({"layer" + std::to_string(t), kNumel, DType::float32, t * kNumel});
  }
  // From the last layer on, ops of 20 tensors, alternately reduced whole and in two halves.
  for (int64_t end = kTensors * kNumel, i = 0; end > 0; end -= 20 * kNumel, ++i) {
    const Block block{end - 20 * kNumel, end};
    if (i % 2) {
      ops.push_back({Collective::reduce_scatter, {block}, 4096, false});
      ops.push_back({Collective::all_gather, {block}, 4096, i % 3 == 0});
    } else {
      ops.push_back({Collective::all_reduce, {block}, 4096, false});
    }
  }
  const Plan plan("long", tensors, ops);
  auto ranks = make_local_communicators(kSize);
  int64_t warm = 0;
  on_each_rank(kSize, [&](int rank) {
    std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
    Engine engine(plan, flat_buffer.data(), *ranks[static_cast<size_t>(rank)], impatient());
    const int last = static_cast<int>(kTensors) - 1;
    for (int64_t step = 1; step <= steps && !testing::Test::HasFailure(); ++step) {
      engine.begin_step();
      for (int t = last; t >= 0; --t) {
        write_gradient(plan, flat_buffer.data(), t, rank, step);
        engine.ready(t);
      }
      engine.end_backward();
      for (int t = 0; t <= last; ++t) {
        engine.wait(t);
        expect_sum(plan, flat_buffer.data(), t, kSize, step);
      }
      engine.drain();
      if (rank == 0 && step == steps / 10) warm = resident_bytes();
    }
  });
  if (!kSanitized) {
    EXPECT_LT(resident_bytes() - warm, 4 << 20);
  }
}

}  // namespace
}  // namespace usbyte
