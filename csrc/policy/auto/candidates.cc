// SPDX-License-Identifier: Apache-2.0
#include "candidates.h"

#include <algorithm>

namespace usbyte {

std::pair<size_t, size_t> count_ops(const Plan& plan, const OneShot& one_shot) {
  const auto shots = std::ranges::count_if(
      plan.ops(), [&](const Op& op) { return one_shot.takes(op.kind, plan.bytes(op)); });
  return {plan.ops().size() - static_cast<size_t>(shots), plan.ops().size()};
}

const Candidate& choose(const std::vector<Candidate>& all, double limit_s, double almost_s,
                        TieBreak tie) {
  const auto best = std::ranges::min_element(all, {}, &Candidate::lateness_s);
  limit_s = std::max(best->lateness_s, std::min(limit_s, best->lateness_s + almost_s));
  const Candidate* chosen = tie == TieBreak::least_late ? &*best : nullptr;
  for (const Candidate& c : all) {
    if (c.lateness_s <= limit_s && (!chosen || c.ops < chosen->ops)) chosen = &c;
  }
  return *chosen;
}

}  // namespace usbyte
