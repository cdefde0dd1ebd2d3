// SPDX-License-Identifier: Apache-2.0
#include "search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace usbyte {
namespace {

constexpr double kSame = 1e-9;  // of an iteration; smaller gains are rounding
constexpr int64_t kMostCombinations = 4000;
constexpr int kNear = 3;  // tensors whose strategies are changed together
constexpr int kMostPasses = 8;

std::vector<const TaskChain*> chains_of(const StrategyTable& options,
                                        const std::vector<int>& choice) {
  std::vector<const TaskChain*> out;
  for (size_t t = 0; t < choice.size(); ++t) {
    out.push_back(&options.of(static_cast<int>(t)).all[static_cast<size_t>(choice[t])]);
  }
  return out;
}

// x^exponent, where exponent is a power of two.
double power(double x, int exponent) {
  for (; exponent > 1; exponent /= 2) x *= x;
  return x;
}

// What the resources have to do, in parts of `scale_s`.
class Loads {
 public:
  Loads(const CompressionJob& job, double scale_s, int exponent)
      : scale_s_(scale_s), exponent_(exponent) {
    // No link or CPU has anything to do before the first tensor is ready.
    seconds_.fill(job.tensors.front().ready_s);
    seconds_[static_cast<size_t>(Resource::compute)] = job.tensors.back().ready_s;
  }

  void add(const std::array<double, kResources>& load, double sign) {
    for (size_t r = 0; r < kResources; ++r) seconds_[r] += sign * load[r];
  }
  // Grows with the largest load, the more so the larger the exponent.
  double pressure(const std::array<double, kResources>& more) const {
    double sum = 0;
    for (size_t r = 0; r < kResources; ++r) {
      sum += power((seconds_[r] + more[r]) / scale_s_, exponent_);
    }
    return sum;
  }

 private:
  std::array<double, kResources> seconds_;
  double scale_s_;
  int exponent_;
};

}  // namespace

StrategySearch::StrategySearch(const CompressionJob& job, const StrategyTable& options,
                               std::vector<int> choice, int64_t work)
    : job_(&job),
      options_(&options),
      choice_(std::move(choice)),
      order_(job.tensors.size()),
      timeline_(job, chains_of(options, choice_)),
      work_(work) {
  std::iota(order_.begin(), order_.end(), 0);
  const auto bytes = [&](int t) {
    const CompressionJob::Tensor& tensor = job.tensors[static_cast<size_t>(t)];
    return tensor.numel * itemsize(tensor.dtype);
  };
  std::sort(order_.begin(), order_.end(),
            [&](int a, int b) { return std::pair(-bytes(a), -a) < std::pair(-bytes(b), -b); });
}

double StrategySearch::iteration_s(const std::vector<int>& choice) {
  std::vector<int> everything(choice.size());
  std::iota(everything.begin(), everything.end(), 0);
  return timeline_.iteration_with(everything, chains_of(*options_, choice),
                                  std::numeric_limits<double>::infinity());
}

bool StrategySearch::moves_nothing(int tensor) const {
  const auto& stages = chain(tensor, choice_[static_cast<size_t>(tensor)]);
  const bool coded =
      std::any_of(stages.resource.begin(), stages.resource.begin() + stages.count, [](uint8_t r) {
        return r == static_cast<uint8_t>(Resource::compute) ||
               r == static_cast<uint8_t>(Resource::cpu);
      });
  return !coded && tensor < timeline_.after_last_bubble();
}

bool StrategySearch::improve(int tensor, const std::vector<int>& candidates) {
  int& chosen = choice_[static_cast<size_t>(tensor)];
  double best_s = timeline_.iteration_s() * (1 - kSame);
  int best = chosen;
  for (int option : candidates) {
    if (option == chosen) continue;
    const double time_s = timeline_.iteration_with(tensor, chain(tensor, option), best_s);
    if (time_s < best_s) {
      best_s = time_s;
      best = option;
    }
  }
  if (best == chosen) return false;
  chosen = best;
  timeline_.set(tensor, chain(tensor, best));
  return true;
}

void StrategySearch::greedy() {
  for (int tensor : order_) {
    if (exhausted()) return;
    if (!moves_nothing(tensor)) improve(tensor, options_->of(tensor).on_one);
  }
}

bool StrategySearch::improve_pair(int first, int second) {
  int& a = choice_[static_cast<size_t>(first)];
  int& b = choice_[static_cast<size_t>(second)];
  const std::vector<int> tensors = {first, second};
  double best_s = timeline_.iteration_s() * (1 - kSame);
  std::pair<int, int> best(a, b);
  for (int i = 0; i < std::ssize(options_->of(first).all); ++i) {
    for (int j = 0; j < std::ssize(options_->of(second).all); ++j) {
      if (i == a || j == b) continue;  // not a change of both
      const double time_s =
          timeline_.iteration_with(tensors, {&chain(first, i), &chain(second, j)}, best_s);
      if (time_s < best_s) {
        best_s = time_s;
        best = {i, j};
      }
    }
  }
  if (best == std::pair(a, b)) return false;
  std::tie(a, b) = best;
  timeline_.set(first, chain(first, a));
  timeline_.set(second, chain(second, b));
  return true;
}

bool StrategySearch::descend_pairs() {
  bool changed = false;
  const int count = static_cast<int>(choice_.size());
  for (int first = 0; first < count; ++first) {
    for (int second = first + 1; second < std::min(count, first + kNear + 1); ++second) {
      if (exhausted()) return changed;
      if (moves_nothing(first) && moves_nothing(second)) continue;
      changed |= improve_pair(first, second);
    }
  }
  return changed;
}

void StrategySearch::descend() {
  std::vector<int> everything;
  bool changed = true;
  while (changed) {
    changed = false;
    for (int tensor : order_) {
      if (exhausted()) return;
      if (moves_nothing(tensor)) continue;
      everything.resize(options_->of(tensor).all.size());
      std::iota(everything.begin(), everything.end(), 0);
      changed |= improve(tensor, everything);
    }
  }
}

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
  std::vector<const TaskChain*> chains;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto first = groups[g].tensors.begin();
    tensors.insert(tensors.end(), first, first + counts[g]);
    chains.resize(tensors.size(), groups[g].on_cpu);
  }
  return timeline_.iteration_with(tensors, chains, limit_s);
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

std::vector<int> balanced_choice(const CompressionJob& job, const StrategyTable& options,
                                 std::vector<int> choice, double scale_s, int exponent) {
  std::map<const Options*, std::vector<std::array<double, kResources>>> loads_of;
  for (size_t t = 0; t < choice.size(); ++t) {
    const Options& own = options.of(static_cast<int>(t));
    auto [it, fresh] = loads_of.try_emplace(&own);
    if (!fresh) continue;
    for (const TaskChain& chain : own.all) it->second.push_back(chain.load());
  }
  Loads loads(job, scale_s, exponent);
  for (size_t t = 0; t < choice.size(); ++t) {
    loads.add(loads_of[&options.of(static_cast<int>(t))][static_cast<size_t>(choice[t])], 1);
  }
  bool changed = true;
  for (int pass = 0; changed && pass < kMostPasses; ++pass) {
    changed = false;
    for (size_t t = choice.size(); t-- > 0;) {
      const auto& own = loads_of[&options.of(static_cast<int>(t))];
      const auto before = static_cast<size_t>(choice[t]);
      loads.add(own[before], -1);
      size_t best = before;
      double least = loads.pressure(own[before]) * (1 - 1e-12);
      for (size_t i = 0; i < own.size(); ++i) {
        const double pressure = loads.pressure(own[i]);
        if (pressure < least) {
          least = pressure;
          best = i;
        }
      }
      loads.add(own[best], 1);
      changed |= best != before;
      choice[t] = static_cast<int>(best);
    }
  }
  return choice;
}

}  // namespace usbyte
