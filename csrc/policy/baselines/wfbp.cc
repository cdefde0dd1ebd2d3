// SPDX-License-Identifier: Apache-2.0
#include "usbyte/policy.h"

namespace usbyte {

Plan wfbp(const Profile& profile, const NetworkModel&, const PolicyOptions&) {
  std::vector<Op> ops;
  for (int i : backward_order(profile)) {
    const TensorSpec& t = profile.tensors[static_cast<size_t>(i)];
    ops.push_back(
        {Collective::all_reduce, {{t.offset, t.end()}}, t.numel * itemsize(t.dtype), true});
  }
  return Plan("wfbp", profile.tensors, std::move(ops));
}

}  // namespace usbyte
