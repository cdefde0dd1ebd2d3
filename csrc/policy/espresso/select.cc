// SPDX-License-Identifier: Apache-2.0
#include "select.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "options.h"
#include "search.h"

namespace usbyte {
namespace {

constexpr size_t kStarts = 20;
constexpr double kMany = 320;         // tensors; of more the search takes longer
constexpr int64_t kLongestWork = 10;  // times as long

// Choices to begin with and their iterations, the shortest first: all tensors that have an option
// take it, or loads are balanced, unless `most_tasks` have been simulated before.
std::vector<std::pair<double, std::vector<int>>> starts(const CompressionJob& job,
                                                        const StrategyTable& options,
                                                        const std::vector<int>& uncompressed,
                                                        StrategySearch& search,
                                                        int64_t most_tasks) {
  const std::vector<int>& found = search.choice();
  const double found_s = search.iteration_s();
  std::map<int, std::vector<int>> by_strategy;
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    const Options& own = options.of(static_cast<int>(t));
    for (size_t i = 0; i < own.all.size(); ++i) {
      auto [it, fresh] = by_strategy.try_emplace(own.all[i].strategy, uncompressed);
      it->second[t] = static_cast<int>(i);
    }
  }
  std::vector<std::pair<double, std::vector<int>>> rated = {{found_s, found}};
  const auto rate = [&](std::vector<int> choice) {
    const double time_s = search.iteration_s(choice);
    rated.emplace_back(time_s, std::move(choice));
  };
  for (auto& [strategy, choice] : by_strategy) rate(std::move(choice));
  for (int exponent : {2, 8, 32}) {
    if (search.tasks() >= most_tasks) break;
    rate(balanced_choice(job, options, uncompressed, found_s, exponent));
    rate(balanced_choice(job, options, found, found_s, exponent));
  }
  std::sort(rated.begin(), rated.end());
  rated.erase(std::unique(rated.begin(), rated.end()), rated.end());
  if (rated.size() > kStarts) rated.resize(kStarts);
  return rated;
}

}  // namespace

StrategySelection select_strategies(const CompressionJob& job, const CompressionCluster& cluster,
                                    std::span<const Strategy> allowed, int64_t work) {
  std::vector<Strategy> tree;
  if (allowed.empty()) {
    tree = decision_tree(cluster);
    allowed = tree;
  }
  if (job.tensors.empty()) return {{}, job.rest_s, job.rest_s, job.rest_s, job.rest_s, 0};
  const StrategyTable options(job, cluster, allowed);
  std::vector<int> uncompressed;
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    uncompressed.push_back(options.of(static_cast<int>(t)).uncompressed);
  }
  StrategySelection out;
  const int64_t most = kLongestWork * work;
  StrategySearch search(job, options, uncompressed, most);
  out.uncompressed_s = search.iteration_s();
  search.greedy();
  out.greedy_s = search.iteration_s();
  search.offload();
  out.offloaded_s = search.iteration_s();
  const auto begins = starts(job, options, uncompressed, search, 2 * most);
  std::vector<int> best = begins.front().second;
  out.iteration_s = begins.front().first;
  out.simulated = search.tasks();
  const double longer = std::pow(static_cast<double>(job.tensors.size()) / kMany, 2);
  auto left = static_cast<int64_t>(static_cast<double>(work) *
                                   std::clamp(longer, 1.0, static_cast<double>(kLongestWork)));
  for (const auto& [_, start] : begins) {
    if (left <= 0) break;
    StrategySearch again(job, options, start, left);
    do {
      again.descend();
    } while (again.descend_pairs());
    left -= again.tasks();
    out.simulated += again.tasks();
    if (again.iteration_s() < out.iteration_s) {
      out.iteration_s = again.iteration_s();
      best = again.choice();
    }
  }
  for (size_t t = 0; t < best.size(); ++t) {
    const TaskChain& chain = options.of(static_cast<int>(t)).all[static_cast<size_t>(best[t])];
    out.strategies.push_back(allowed[static_cast<size_t>(chain.strategy)]);
  }
  return out;
}

}  // namespace usbyte
