#include <algorithm>
#include <numeric>
#include <utility>

#include "search.h"

namespace usbyte {
namespace {

constexpr int kMostPasses = 8;

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

std::vector<int> balanced_choice(const CompressionJob& job, const OptionTable& options,
                                 std::vector<int> choice, double scale_s, int exponent) {
  std::map<const Options*, std::vector<std::array<double, kResources>>> loads_of;
  for (size_t t = 0; t < choice.size(); ++t) {
    const Options& own = options.of(static_cast<int>(t));
    auto [it, fresh] = loads_of.try_emplace(&own);
    if (!fresh) continue;
    for (const Chain& chain : own.all) it->second.push_back(chain.load());
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
