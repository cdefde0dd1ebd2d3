#include <algorithm>

#include "priority_trace.h"
#include "usbyte/policy.h"

namespace usbyte {

Plan p3(const Profile& profile, const NetworkModel& network, const PolicyOptions&) {
  constexpr int64_t kSlice = 40'000;  // parameters
  std::vector<Part> slices;
  for (int i : forward_order(profile)) {
    const TensorSpec& t = profile.tensors[static_cast<size_t>(i)];
    for (int64_t at = t.offset; at < t.end(); at += kSlice) {
      const Block slice{at, std::min(at + kSlice, t.end())};
      slices.push_back(
          {slice, slice.numel() * itemsize(t.dtype), profile.ready_s[static_cast<size_t>(i)]});
    }
  }
  // Fenced, so the window admits any slice.
  return Plan("p3", profile.tensors,
              priority_trace(slices, network, kSlice * itemsize(DType::float64), true));
}

}  // namespace usbyte
