// SPDX-License-Identifier: Apache-2.0
#include "dear.h"

#include <algorithm>

namespace usbyte {

std::vector<FusedGroup> fused_groups(const Profile& profile, int64_t fusion_bytes) {
  std::vector<FusedGroup> groups;
  for (size_t i = profile.tensors.size(); i-- > 0;) {
    const TensorSpec& t = profile.tensors[i];
    const int64_t bytes = t.numel * itemsize(t.dtype);
    if (!groups.empty() && profile.tensors[i + 1].dtype == t.dtype &&
        groups.back().bytes + bytes <= fusion_bytes) {
      FusedGroup& open = groups.back();
      open.block.begin = t.offset;
      open.bytes += bytes;
      open.ready_s = std::max(open.ready_s, profile.ready_s[i]);
      open.need_s = std::min(open.need_s, profile.need_s[i]);
    } else {
      groups.push_back({{t.offset, t.end()}, bytes, profile.ready_s[i], profile.need_s[i]});
    }
  }
  return groups;
}

Plan dear_plan(std::string policy, const Profile& profile, std::vector<FusedGroup> groups) {
  std::vector<Op> ops;
  const auto append = [&](Collective kind) {
    for (const FusedGroup& g : groups) ops.push_back({kind, {g.block}, g.bytes, true});
  };
  std::stable_sort(groups.begin(), groups.end(),
                   [](const FusedGroup& a, const FusedGroup& b) { return a.ready_s < b.ready_s; });
  append(Collective::reduce_scatter);
  std::sort(groups.begin(), groups.end(), [](const FusedGroup& a, const FusedGroup& b) {
    return std::pair(a.need_s, a.block) < std::pair(b.need_s, b.block);
  });
  append(Collective::all_gather);
  return Plan(std::move(policy), profile.tensors, std::move(ops));
}

Plan dear(const Profile& profile, const NetworkModel&, const PolicyOptions& options) {
  return dear_plan("dear", profile, fused_groups(profile, options.fusion_bytes));
}

}  // namespace usbyte
