#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "search.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr size_t kStarts = 20;
constexpr double kMany = 320;         // tensors; of more the search takes longer
constexpr int64_t kLongestWork = 10;  // times as long

std::vector<const Chain*> pointers(const std::vector<Chain>& chains) {
  std::vector<const Chain*> out;
  for (const Chain& chain : chains) out.push_back(&chain);
  return out;
}

std::vector<Chain> chains_of(const CompressionJob& job, const CompressionCluster& cluster,
                             std::span<const Strategy> strategies) {
  if (strategies.size() != job.tensors.size()) {
    throw UsageError(std::to_string(strategies.size()) + " strategies for " +
                     std::to_string(job.tensors.size()) + " tensors");
  }
  std::vector<Chain> out;
  for (size_t t = 0; t < strategies.size(); ++t) {
    const CompressionJob::Tensor& tensor = job.tensors[t];
    const std::optional<Chain> chain = ChainMaker(cluster, tensor).make(strategies[t]);
    if (!chain) {
      throw UsageError("strategy '" + strategies[t].describe() + "' is none for " +
                       std::string(name(tensor.dtype)) + " with codec '" + tensor.codec + "' on " +
                       std::to_string(cluster.nodes) + " nodes of " +
                       std::to_string(cluster.ranks_per_node) + " ranks");
    }
    out.push_back(*chain);
  }
  return out;
}

// Choices to begin with and their iterations, the shortest first: all tensors that have an option
// take it, or loads are balanced, unless `most_tasks` have been simulated before.
std::vector<std::pair<double, std::vector<int>>> starts(const CompressionJob& job,
                                                        const OptionTable& options,
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

CompressionJob CompressionJob::of(const Profile& profile, Overlap overlap,
                                  std::span<const std::string> codec_of) {
  profile.validate();
  if (!codec_of.empty() && codec_of.size() != profile.tensors.size()) {
    throw UsageError(std::to_string(codec_of.size()) + " codecs for " +
                     std::to_string(profile.tensors.size()) + " tensors");
  }
  const std::vector<double> due_s = due_times(profile, overlap);
  CompressionJob job;
  job.rest_s = profile.iteration_s() - profile.backward_end_s();
  for (int i : backward_order(profile)) {
    const auto t = static_cast<size_t>(i);
    job.tensors.push_back({profile.tensors[t].numel, profile.tensors[t].dtype, profile.ready_s[t],
                           profile.iteration_s() - due_s[t],
                           codec_of.empty() || codec_of[t].empty() ? "none" : codec_of[t]});
  }
  return job;
}

double iteration_s(const CompressionJob& job, const CompressionCluster& cluster,
                   std::span<const Strategy> strategies) {
  const std::vector<Chain> chains = chains_of(job, cluster, strategies);
  return CompressionTimeline(job, pointers(chains)).iteration_s();
}

std::vector<ScheduledStage> schedule(const CompressionJob& job, const CompressionCluster& cluster,
                                     std::span<const Strategy> strategies) {
  const std::vector<Chain> chains = chains_of(job, cluster, strategies);
  std::vector<ScheduledStage> out = CompressionTimeline(job, pointers(chains)).starts();
  std::erase_if(out, [&](const ScheduledStage& stage) {
    const StageKind kind =
        strategies[static_cast<size_t>(stage.tensor)].stages[static_cast<size_t>(stage.stage)].kind;
    return kind == StageKind::encode || kind == StageKind::decode;
  });
  std::sort(out.begin(), out.end(), [](const ScheduledStage& a, const ScheduledStage& b) {
    return std::tuple(a.start_s, a.tensor, a.stage) < std::tuple(b.start_s, b.tensor, b.stage);
  });
  return out;
}

StrategySelection select_strategies(const CompressionJob& job, const CompressionCluster& cluster,
                                    std::span<const Strategy> allowed, int64_t work) {
  std::vector<Strategy> tree;
  if (allowed.empty()) {
    tree = decision_tree(cluster);
    allowed = tree;
  }
  if (job.tensors.empty()) return {{}, job.rest_s, job.rest_s, job.rest_s, job.rest_s, 0};
  const OptionTable options(job, cluster, allowed);
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
    const Chain& chain = options.of(static_cast<int>(t)).all[static_cast<size_t>(best[t])];
    out.strategies.push_back(allowed[static_cast<size_t>(chain.strategy)]);
  }
  return out;
}

}  // namespace usbyte
