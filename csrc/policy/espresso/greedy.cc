#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "search.h"

namespace usbyte {
namespace {

constexpr double kSame = 1e-9;  // of an iteration; smaller gains are rounding
constexpr int kNear = 3;        // tensors whose strategies are changed together

std::vector<const Chain*> chains_of(const OptionTable& options, const std::vector<int>& choice) {
  std::vector<const Chain*> out;
  for (size_t t = 0; t < choice.size(); ++t) {
    out.push_back(&options.of(static_cast<int>(t)).all[static_cast<size_t>(choice[t])]);
  }
  return out;
}

}  // namespace

StrategySearch::StrategySearch(const CompressionJob& job, const OptionTable& options,
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
  return timeline_.with(everything, chains_of(*options_, choice),
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
    const double time_s = timeline_.with(tensor, chain(tensor, option), best_s);
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
      const double time_s = timeline_.with(tensors, {&chain(first, i), &chain(second, j)}, best_s);
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

}  // namespace usbyte
