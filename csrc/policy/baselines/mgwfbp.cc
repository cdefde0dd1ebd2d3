// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "policy/support/merge_adjacent.h"
#include "usbyte/policy.h"

namespace usbyte {
// The rule has three conditions: the gradient is ready before the op would end, and either before
// the op starts or less than a startup later. As an op takes a startup at least, the last implies
// the others. A group's start depends only on the groups before it, so one pass decides all merges.
Plan mgwfbp(const Profile& profile, const NetworkModel& network, const PolicyOptions&) {
  const AlphaBeta cost = network.cost(Collective::all_reduce, 1);
  std::vector<Op> ops;
  std::vector<Block> group;
  DType dtype{};
  int64_t bytes = 0;
  double free_s = 0;   // when the groups before this one have been sent
  double start_s = 0;  // of this group's op
  const auto close = [&] {
    if (group.empty()) return;
    ops.push_back({Collective::all_reduce, merge_adjacent(std::move(group)), bytes, true});
    free_s = start_s + cost.time_s(bytes);
    group.clear();
    bytes = 0;
  };
  for (int i : backward_order(profile)) {
    const TensorSpec& t = profile.tensors[static_cast<size_t>(i)];
    const double ready_s = profile.ready_s[static_cast<size_t>(i)];
    const int64_t more = t.numel * itemsize(t.dtype);
    // A startup, where it costs the same whatever follows it.
    const double saved_s = cost.time_s(bytes) + cost.time_s(more) - cost.time_s(bytes + more);
    const bool merge = !group.empty() && t.dtype == dtype && ready_s - start_s < saved_s;
    if (!merge) close();
    group.push_back({t.offset, t.end()});
    dtype = t.dtype;
    bytes += more;
    start_s = std::max(free_s, ready_s);
  }
  close();
  return Plan("mgwfbp", profile.tensors, std::move(ops));
}

}  // namespace usbyte
