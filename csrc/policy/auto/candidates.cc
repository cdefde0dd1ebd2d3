// SPDX-License-Identifier: Apache-2.0
#include "candidates.h"

#include <algorithm>
#include <limits>

namespace usbyte {

Candidates::OpCount Candidates::count_ops(const Plan& plan, const OneShot& one_shot) {
  const auto shots = std::ranges::count_if(
      plan.ops(), [&](const Op& op) { return one_shot.takes(op.kind, plan.bytes(op)); });
  return {plan.ops().size() - static_cast<size_t>(shots), plan.ops().size()};
}

void Candidates::add(double lateness_s, OpCount ops, Plan plan) {
  for (const Candidate& c : front_) {
    if (c.lateness_s <= lateness_s && c.ops <= ops) return;
  }
  std::erase_if(front_,
                [&](const Candidate& c) { return lateness_s <= c.lateness_s && ops <= c.ops; });
  front_.push_back({lateness_s, ops, std::move(plan)});
}

double Candidates::least_s() const {
  double least_s = std::numeric_limits<double>::infinity();
  for (const Candidate& c : front_) least_s = std::min(least_s, c.lateness_s);
  return least_s;
}

const Plan& Candidates::choose(double limit_s, double almost_s) const {
  const double least = least_s();
  limit_s = std::max(least, std::min(limit_s, least + almost_s));
  const Candidate* chosen = nullptr;
  for (const Candidate& c : front_) {
    if (c.lateness_s <= limit_s && (!chosen || c.ops < chosen->ops)) chosen = &c;
  }
  return chosen->plan;
}

}  // namespace usbyte
