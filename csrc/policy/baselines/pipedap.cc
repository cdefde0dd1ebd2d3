// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "usbyte/policy.h"

namespace usbyte {

Plan pipedap(const Profile& profile, const NetworkModel& network, const PolicyOptions&) {
  const AlphaBeta whole = network.cost(Collective::all_reduce, 1);
  const AlphaBeta scatter = network.cost(Collective::reduce_scatter, 1);
  const AlphaBeta gather = network.cost(Collective::all_gather, 1);
  std::vector<Op> ops;
  std::vector<bool> gathered(profile.tensors.size());
  const auto append = [&](Collective kind, size_t i) {
    const TensorSpec& t = profile.tensors[i];
    const int64_t bytes = t.numel * itemsize(t.dtype);
    ops.push_back({kind, {{t.offset, t.end()}}, bytes, true});
    return bytes;
  };
  const std::vector<int> backward = backward_order(profile);
  double channel_s = 0;
  for (size_t r = 0; r < backward.size(); ++r) {
    const size_t i = static_cast<size_t>(backward[r]);
    const int64_t bytes = append(Collective::reduce_scatter, i);
    channel_s = std::max(channel_s, profile.ready_s[i]) + scatter.time_s(bytes);
    if (r + 1 == backward.size()) break;  // no scatter follows that could leave it idle
    const double slack_s =
        std::max(profile.ready_s[static_cast<size_t>(backward[r + 1])] - channel_s, 0.0);
    if (slack_s + whole.alpha_s > whole.time_s(bytes) / 2) {
      append(Collective::all_gather, i);
      channel_s += gather.time_s(bytes);
      gathered[i] = true;
    }
  }
  for (int i : forward_order(profile)) {
    if (!gathered[static_cast<size_t>(i)]) append(Collective::all_gather, static_cast<size_t>(i));
  }
  return Plan("pipedap", profile.tensors, std::move(ops));
}

}  // namespace usbyte
