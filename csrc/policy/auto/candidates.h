// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// Share of an iteration by which a plan may be later than the best one and still be chosen.
inline constexpr double kAlmost = 0.004;

/// The simulated plans that no other one beats in both lateness and number of ops.
class Candidates {
 public:
  /// Number of ops without those that go in one shot, then of all. Ops that go in one shot have
  /// connections of their own, so they count less.
  using OpCount = std::pair<size_t, size_t>;
  static OpCount count_ops(const Plan& plan, const OneShot& one_shot);

  /// Among plans that are equal in both, the first one stays.
  void add(double lateness_s, OpCount ops, Plan plan);
  /// The least lateness so far; infinity if there is no plan.
  double least_s() const;
  /// The plan with the fewest ops among those that are at most `limit_s` late and at most
  /// `almost_s` later than the best; the best if it is later than `limit_s`. Real ops cost more
  /// than the model says rather than less, hence few of them. There must be a plan.
  const Plan& choose(double limit_s, double almost_s) const;

 private:
  struct Candidate {
    double lateness_s;
    OpCount ops;
    Plan plan;
  };
  std::vector<Candidate> front_;
};

}  // namespace usbyte
