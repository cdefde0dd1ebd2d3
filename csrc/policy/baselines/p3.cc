// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "policy/support/priority_trace.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"

namespace usbyte {
namespace {

constexpr int64_t kSlice = 40'000;  // parameters
constexpr int64_t kMostSlices = 1'000'000;

}  // namespace

int64_t p3_parts(const Profile& profile, const PolicyOptions& /*options*/) {
  int64_t total = 0;
  for (const TensorSpec& t : profile.tensors) total += t.numel / kSlice + (t.numel % kSlice > 0);
  return total;
}

Plan p3(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  if (const int64_t total = p3_parts(profile, options); total > kMostSlices) {
    throw UsageError("p3: slices of " + std::to_string(kSlice) + " parameters would be " +
                     std::to_string(total) + ", and " + std::to_string(kMostSlices) +
                     " is the most: take another policy for so many parameters");
  }
  std::vector<ReadyBlock> slices;
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
