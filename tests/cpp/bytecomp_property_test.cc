// SPDX-License-Identifier: Apache-2.0
// ByteComp beside simpler ways to the same: a plain simulation, and trying every choice.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "policy/espresso/select.h"
#include "policy/espresso/timeline.h"
#include "random_job.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr const char* kCodecs[] = {"efsignsgd", "topk:0.01", "fp16"};

double between(std::mt19937& rng, double low, double high) {
  return std::exp(uniform_real(rng, std::log(low), std::log(high)));
}

CodecCosts random_costs(std::mt19937& rng, double slow) {
  CodecCosts costs;
  for (const char* spec : kCodecs) {
    const auto cost = [&] {
      const double alpha_s = slow * between(rng, 1e-5, 1e-3);
      return AlphaBeta{alpha_s, slow * between(rng, 1e-11, 1e-9), alpha_s};
    };
    costs.by_spec[spec] = {cost(), cost()};
  }
  return costs;
}

CompressionCluster random_cluster(std::mt19937& rng) {
  return CompressionCluster::thakur(2 << uniform(rng, 0, 2), 1 << uniform(rng, 0, 2),
                                    between(rng, 1e-6, 1e-4), between(rng, 1e9, 1e11),
                                    between(rng, 1e-6, 1e-3), between(rng, 1e8, 2e10),
                                    random_costs(rng, 1), random_costs(rng, 3));
}

// Sizes come several times, and backward and communication take about as long.
CompressionJob random_gradients(std::mt19937& rng, int64_t count) {
  CompressionJob job;
  double now_s = 0;
  auto numel = static_cast<int64_t>(between(rng, 1e3, 5e7));
  const bool forward = uniform(rng, 0, 3) == 0;
  for (int64_t i = 0; i < count; ++i) {
    now_s += between(rng, 1e-5, 2e-2);
    if (uniform(rng, 0, 1)) numel = static_cast<int64_t>(between(rng, 1e3, 5e7));
    const double rest_s = forward ? -uniform_real(rng, 0, now_s / 2) : 0;
    job.tensors.push_back(
        {numel, DType::float32, now_s, rest_s, kCodecs[static_cast<size_t>(uniform(rng, 0, 2))]});
  }
  return job;
}

// Some of each kind of the decision tree, with their twins on one processor.
std::vector<Strategy> reduced_tree(std::mt19937& rng, const CompressionCluster& cluster) {
  constexpr size_t kMost = 11;
  const std::vector<Strategy> tree = decision_tree(cluster);
  std::set<Strategy> out = {Strategy::parse("AR"), Strategy::parse("C[gpu] AG D[gpu]"),
                            Strategy::parse("C[cpu] AG D[cpu]"), tree[1]};
  while (out.size() < kMost) {
    const Strategy& one = tree[static_cast<size_t>(uniform(rng, 0, std::ssize(tree) - 1))];
    for (const Strategy& each : {one, one.on(Processor::gpu), one.on(Processor::cpu)}) {
      if (out.size() < kMost) out.insert(each);
    }
  }
  return {out.begin(), out.end()};
}

// Looks for the next task to arrive among all tensors, again and again.
double plain_iteration_s(const CompressionJob& job, const std::vector<TaskChain>& chains) {
  struct Next {
    double at_s;
    size_t order;  // at one time: codecs of a tensor before what backward does next
    int resource;
    double seconds;
    size_t chain;
    int stage;
  };
  const size_t count = chains.size();
  std::vector<Next> waiting;
  std::array<double, kResources> free_s{};
  double end_s = job.rest_s;
  const auto arrive = [&](size_t chain, int stage, double at_s) {
    const auto s = static_cast<size_t>(stage);
    if (stage == chains[chain].count) {
      end_s = std::max(end_s, at_s + job.tensors[chain].rest_s);
    } else {
      waiting.push_back(
          {at_s, 2 * chain + 1, chains[chain].resource[s], chains[chain].seconds[s], chain, stage});
    }
  };
  const auto backward = [&](size_t tensor, double at_s) {
    if (tensor == count) {
      end_s = std::max(end_s, at_s + job.rest_s);
      return;
    }
    const double before_s = tensor == 0 ? 0 : job.tensors[tensor - 1].ready_s;
    waiting.push_back({at_s, 2 * tensor, static_cast<int>(Resource::compute),
                       job.tensors[tensor].ready_s - before_s, tensor, -1});
  };
  backward(0, 0);
  while (!waiting.empty()) {
    const auto first =
        std::min_element(waiting.begin(), waiting.end(), [](const Next& a, const Next& b) {
          return std::pair(a.at_s, a.order) < std::pair(b.at_s, b.order);
        });
    const Next task = *first;
    waiting.erase(first);
    double& free = free_s[static_cast<size_t>(task.resource)];
    free = std::max(free, task.at_s) + task.seconds;
    if (task.stage >= 0) {
      arrive(task.chain, task.stage + 1, free);
    } else {
      arrive(task.chain, 0, free);
      backward(task.chain + 1, free);
    }
  }
  return end_s;
}

TEST(ByteCompProperties, TheTimelineIsThatOfAPlainSimulationAfterAnyChange) {
  std::mt19937 rng(21);
  for (int i = 0; i < cases(150); ++i) {
    const CompressionCluster cluster = random_cluster(rng);
    const CompressionJob job = random_gradients(rng, uniform(rng, 1, 25));
    const std::vector<Strategy> tree = decision_tree(cluster);
    const auto any = [&](size_t tensor) {
      for (;;) {
        const auto s = static_cast<size_t>(uniform(rng, 0, std::ssize(tree) - 1));
        if (const auto chain = TaskChainBuilder(cluster, job.tensors[tensor]).make(tree[s]))
          return *chain;
      }
    };
    std::vector<TaskChain> chains;
    std::vector<const TaskChain*> pointers;
    for (size_t t = 0; t < job.tensors.size(); ++t) chains.push_back(any(t));
    for (const TaskChain& chain : chains) pointers.push_back(&chain);
    CompressionTimeline timeline(job, pointers);
    EXPECT_DOUBLE_EQ(timeline.iteration_s(), plain_iteration_s(job, chains));
    for (int change = 0; change < 5; ++change) {
      const auto t = static_cast<size_t>(uniform(rng, 0, std::ssize(chains) - 1));
      const TaskChain tried = any(t), before = chains[t];
      chains[t] = tried;
      const double expected_s = plain_iteration_s(job, chains);
      const double limit_s = expected_s * uniform_real(rng, 0.9, 1.1);
      const double found_s = timeline.iteration_with(static_cast<int>(t), tried, limit_s);
      if (expected_s < limit_s * (1 - 1e-12)) {
        EXPECT_DOUBLE_EQ(found_s, expected_s);
      } else if (expected_s > limit_s * (1 + 1e-12)) {
        EXPECT_TRUE(std::isinf(found_s));
      }
      if (uniform(rng, 0, 1)) {
        timeline.set(static_cast<int>(t), chains[t]);
        EXPECT_DOUBLE_EQ(timeline.iteration_s(), expected_s);
      } else {
        chains[t] = before;
      }
    }
  }
}

TEST(ByteCompProperties, ShorteningWhatEndsBeforeABubbleGainsNothing) {
  std::mt19937 rng(22);
  int bubbles = 0;
  for (int i = 0; i < cases(200); ++i) {
    const CompressionCluster cluster = random_cluster(rng);
    CompressionJob job = random_gradients(rng, uniform(rng, 2, 12));
    for (auto& tensor : job.tensors) tensor.numel = tensor.numel / 50 + 1;
    const Strategy plain = Strategy::parse("AR");
    std::vector<TaskChain> chains;
    std::vector<const TaskChain*> pointers;
    for (const auto& tensor : job.tensors)
      chains.push_back(*TaskChainBuilder(cluster, tensor).make(plain));
    for (const TaskChain& chain : chains) pointers.push_back(&chain);
    CompressionTimeline timeline(job, pointers);
    TaskChain nothing;
    nothing.count = 0;
    for (int t = 0; t < timeline.after_last_bubble(); ++t) {
      EXPECT_DOUBLE_EQ(timeline.iteration_with(t, nothing, 1e9), timeline.iteration_s());
      ++bubbles;
    }
  }
  EXPECT_GT(bubbles, 50);
}

TEST(ByteCompProperties, SelectionIsNearTheBestOfAllChoices) {
  std::mt19937 rng(23);
  double sum = 0;
  const int jobs = cases(220);
  for (int i = 0; i < jobs; ++i) {
    const CompressionCluster cluster = random_cluster(rng);
    const CompressionJob job = random_gradients(rng, uniform(rng, 1, 4));
    const std::vector<Strategy> tree = reduced_tree(rng, cluster);
    const size_t count = job.tensors.size();
    std::vector<std::vector<TaskChain>> options(count);
    for (size_t t = 0; t < count; ++t) {
      const TaskChainBuilder maker(cluster, job.tensors[t]);
      for (const Strategy& strategy : tree) {
        if (const auto chain = maker.make(strategy)) options[t].push_back(*chain);
      }
    }
    std::vector<size_t> digits(count);
    std::vector<const TaskChain*> chosen(count);
    for (size_t t = 0; t < count; ++t) chosen[t] = &options[t][0];
    CompressionTimeline timeline(job, chosen);
    std::vector<int> everything(count);
    std::iota(everything.begin(), everything.end(), 0);
    double best_s = timeline.iteration_s();
    for (size_t t = 0; t < count;) {
      best_s = std::min(best_s, timeline.iteration_with(everything, chosen, best_s));
      for (t = 0; t < count && ++digits[t] == options[t].size(); ++t) digits[t] = 0;
      for (size_t u = 0; u < count; ++u) chosen[u] = &options[u][digits[u]];
    }
    const StrategySelection found = select_strategies(job, cluster, tree);
    EXPECT_NEAR(found.iteration_s, iteration_s(job, cluster, found.strategies), 1e-12);
    EXPECT_LE(found.iteration_s, found.offloaded_s);
    EXPECT_LE(found.offloaded_s, found.greedy_s);
    EXPECT_LE(found.greedy_s, found.uncompressed_s);
    EXPECT_GE(found.iteration_s, best_s * (1 - 1e-9));
    EXPECT_LE(found.iteration_s, best_s * 1.05) << "job " << i;
    sum += found.iteration_s / best_s;
  }
  EXPECT_LT(sum / jobs, 1.002);
}

// However many tensors there are: the search ends before it has tried everything.
TEST(ByteCompProperties, ManyTensorsAreNoWorseOffThanWithOneStrategyForAll) {
  std::mt19937 rng(26);
  for (size_t count : {200, 600}) {
    const CompressionCluster cluster = random_cluster(rng);
    CompressionJob job = random_gradients(rng, 8);
    for (CompressionJob::Tensor& tensor : job.tensors) tensor.codec = kCodecs[0];
    const double lasts_s = job.tensors.back().ready_s;
    while (job.tensors.size() < count) {
      CompressionJob::Tensor next = job.tensors[job.tensors.size() - 8];
      next.ready_s += lasts_s;
      job.tensors.push_back(next);
    }
    const std::vector<Strategy> tree = reduced_tree(rng, cluster);
    const StrategySelection found = select_strategies(job, cluster, tree, 20'000);
    for (const Strategy& strategy : tree) {
      if (!TaskChainBuilder(cluster, job.tensors.front()).make(strategy)) continue;
      const std::vector<Strategy> same(job.tensors.size(), strategy);
      EXPECT_LE(found.iteration_s, iteration_s(job, cluster, same) * (1 + 1e-9))
          << strategy.describe();
    }
  }
}

TEST(ByteCompProperties, MoreWorkNeverMakesItWorseThanNoCompression) {
  std::mt19937 rng(24);
  for (int i = 0; i < cases(10); ++i) {
    const CompressionCluster cluster = random_cluster(rng);
    const CompressionJob job = random_gradients(rng, 40);
    for (int64_t work : {0, 1000, 100'000}) {
      const StrategySelection found = select_strategies(job, cluster, {}, work);
      EXPECT_LE(found.iteration_s, found.uncompressed_s);
      EXPECT_EQ(found.strategies, select_strategies(job, cluster, {}, work).strategies);
    }
  }
}

}  // namespace
}  // namespace usbyte
