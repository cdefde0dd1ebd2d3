#include <algorithm>
#include <map>
#include <utility>

#include "search.h"

namespace usbyte {
namespace {

constexpr int64_t kMostCombinations = 4000;
constexpr double kSame = 1e-9;

}  // namespace

std::vector<StrategySearch::Group> StrategySearch::groups() const {
  std::map<std::pair<const Options*, int>, size_t> place;
  std::vector<Group> out;
  for (size_t t = 0; t < choice_.size(); ++t) {
    const int tensor = static_cast<int>(t);
    const Options& options = options_->of(tensor);
    const int twin = options.on_cpu[static_cast<size_t>(choice_[t])];
    if (twin < 0) continue;
    const auto [it, fresh] = place.try_emplace({&options, choice_[t]}, out.size());
    if (fresh) out.push_back({&chain(tensor, twin), twin, {}});
    out[it->second].tensors.push_back(tensor);
  }
  return out;
}

double StrategySearch::with_offloaded(const std::vector<Group>& groups,
                                      const std::vector<int>& counts, double limit_s) {
  std::vector<int> tensors;
  std::vector<const Chain*> chains;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto first = groups[g].tensors.begin();
    tensors.insert(tensors.end(), first, first + counts[g]);
    chains.resize(tensors.size(), groups[g].on_cpu);
  }
  return timeline_.with(tensors, chains, limit_s);
}

std::vector<int> StrategySearch::best_of_all(const std::vector<Group>& groups) {
  std::vector<int> counts(groups.size()), best = counts;
  double best_s = iteration_s() * (1 - kSame);
  while (!exhausted()) {
    size_t g = 0;  // the next combination
    while (g < groups.size() && counts[g] == std::ssize(groups[g].tensors)) counts[g++] = 0;
    if (g == groups.size()) break;
    ++counts[g];
    const double time_s = with_offloaded(groups, counts, best_s);
    if (time_s < best_s) {
      best_s = time_s;
      best = counts;
    }
  }
  return best;
}

std::vector<int> StrategySearch::best_in_turns(const std::vector<Group>& groups) {
  std::vector<int> best(groups.size());
  double best_s = iteration_s() * (1 - kSame);
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t g = 0; g < groups.size(); ++g) {
      std::vector<int> counts = best;
      for (counts[g] = 0; counts[g] <= std::ssize(groups[g].tensors); ++counts[g]) {
        if (exhausted()) return best;
        const double time_s = with_offloaded(groups, counts, best_s);
        if (time_s < best_s) {
          best_s = time_s * (1 - kSame);
          best[g] = counts[g];
          changed = true;
        }
      }
    }
  }
  return best;
}

void StrategySearch::offload() {
  const std::vector<Group> found = groups();
  int64_t combinations = 1;
  for (const Group& group : found) {
    combinations = std::min(combinations * (std::ssize(group.tensors) + 1), kMostCombinations + 1);
  }
  const std::vector<int> counts =
      combinations > kMostCombinations ? best_in_turns(found) : best_of_all(found);
  for (size_t g = 0; g < found.size(); ++g) {
    for (size_t i = 0; i < static_cast<size_t>(counts[g]); ++i) {
      const int tensor = found[g].tensors[i];
      choice_[static_cast<size_t>(tensor)] = found[g].on_cpu_index;
      timeline_.set(tensor, *found[g].on_cpu);
    }
  }
}

}  // namespace usbyte
