// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// Share of a step's time that a plan must save to replace the one it is compared with.
inline constexpr double kWorthwhile = 0.01;
/// Share of an iteration by which a plan may be later than the best one and still be chosen.
inline constexpr double kAlmost = 0.005;

/// A plan that was simulated.
struct Candidate {
  double lateness_s;
  std::pair<size_t, size_t> ops;  ///< without those that go in one shot; all
  Plan plan;
};

/// `Candidate::ops` of a plan.
std::pair<size_t, size_t> count_ops(const Plan& plan, const OneShot& one_shot);

/// Which of several candidates with equally few ops is chosen.
enum class TieBreak { first_in_list, least_late };

/// The candidate with the fewest ops among those that are at most `limit_s` late and at most
/// `almost_s` later than the best; the best if it is later than `limit_s`. Real ops cost more than
/// the model says rather than less, hence few of them. Ops that go in one shot have connections of
/// their own, so they count less.
const Candidate& choose(const std::vector<Candidate>& all, double limit_s, double almost_s,
                        TieBreak tie = TieBreak::first_in_list);

}  // namespace usbyte
