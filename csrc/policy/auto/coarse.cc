// SPDX-License-Identifier: Apache-2.0
#include "coarse.h"

#include <algorithm>

namespace usbyte {

Profile coarse(const Profile& profile, int64_t parts) {
  const double most_s = profile.iteration_s() / static_cast<double>(parts);
  const int64_t most_bytes = profile.bytes() / parts;
  Profile out{{}, {}, {}, profile.step_s, profile.update_s, profile.model};
  double first_ready_s = 0, last_need_s = 0;  // of what is last in `out`
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    const TensorSpec& t = profile.tensors[i];
    const double need_s = profile.need_s[i], ready_s = profile.ready_s[i];
    if (!out.tensors.empty()) {
      TensorSpec& into = out.tensors.back();
      const double earliest_s = std::min(first_ready_s, ready_s);
      const double latest_s = std::max(out.ready_s.back(), ready_s);
      const double first_s = std::min(out.need_s.back(), need_s);
      const double last_s = std::max(last_need_s, need_s);
      if (into.dtype == t.dtype && (into.numel + t.numel) * itemsize(t.dtype) <= most_bytes &&
          latest_s - earliest_s <= most_s && last_s - first_s <= most_s) {
        into.numel += t.numel;
        out.ready_s.back() = latest_s;
        out.need_s.back() = first_s;
        first_ready_s = earliest_s;
        last_need_s = last_s;
        continue;
      }
    }
    out.tensors.push_back({t.name, t.numel, t.dtype, t.offset});
    out.need_s.push_back(need_s);
    out.ready_s.push_back(ready_s);
    first_ready_s = ready_s;
    last_need_s = need_s;
  }
  return out;
}

}  // namespace usbyte
