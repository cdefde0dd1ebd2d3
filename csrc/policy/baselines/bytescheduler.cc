// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "policy/support/priority_trace.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"

namespace usbyte {
namespace {

constexpr int64_t kMostParts = 1'000'000;  // as many as a plan can be made of in seconds

int64_t parts_of(const TensorSpec& t, int64_t partition_bytes) {
  const int64_t limit = std::max<int64_t>(partition_bytes / itemsize(t.dtype), 1);
  return t.numel / limit + (t.numel % limit > 0);
}

}  // namespace

int64_t bytescheduler_parts(const Profile& profile, const PolicyOptions& options) {
  int64_t total = 0;
  for (const TensorSpec& t : profile.tensors) total += parts_of(t, options.partition_bytes);
  return total;
}

Plan bytescheduler(const Profile& profile, const NetworkModel& network,
                   const PolicyOptions& options) {
  std::vector<ReadyBlock> parts;
  if (const int64_t total = bytescheduler_parts(profile, options); total > kMostParts) {
    throw UsageError("bytescheduler: parts of " + std::to_string(options.partition_bytes) +
                     " bytes would be " + std::to_string(total) + ", and " +
                     std::to_string(kMostParts) + " is the most: take a larger partition");
  }
  for (int i : forward_order(profile)) {
    const TensorSpec& t = profile.tensors[static_cast<size_t>(i)];
    const int64_t count = parts_of(t, options.partition_bytes);
    for (int64_t k = 0; k < count; ++k) {
      const Block block{t.offset + t.numel * k / count, t.offset + t.numel * (k + 1) / count};
      parts.push_back(
          {block, block.numel() * itemsize(t.dtype), profile.ready_s[static_cast<size_t>(i)]});
    }
  }
  return Plan("bytescheduler", profile.tensors,
              priority_trace(parts, network, options.credit_bytes, false));
}

}  // namespace usbyte
