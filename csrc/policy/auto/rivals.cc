// SPDX-License-Identifier: Apache-2.0
#include "rivals.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "policy/support/priority_trace.h"
#include "usbyte/codec.h"

namespace usbyte {
namespace {

constexpr int64_t kMostParts = 100'000;      // their simulation takes too long
constexpr int64_t kMostTunedParts = 10'000;  // for each of some hundred sizes
constexpr double kManyTensors = 64;          // of more not every bucket size is tried
constexpr size_t kMostUnitTensors = 1000;    // us_byte's time grows with their square
constexpr double kBucketWork = 20'000;       // tensors; more of it, closer sizes

bool in_two_rounds(const PolicyOptions& options) {
  return std::ranges::any_of(options.codec_of, [](const std::string& spec) {
    const auto codec = make_codec(spec);
    return codec && codec->matrices();
  });
}

// Buckets are closed once they hold the bucket size: another size makes a difference once it is
// more than the smallest of them holds.
void ddp_buckets(const Profile& profile, const NetworkModel& network, PolicyOptions options,
                 const std::function<void(Plan)>& found) {
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  const double growth =
      std::max(static_cast<double>(profile.tensors.size()) - kManyTensors, 0.0) / kBucketWork;
  for (int64_t size = 1; size < kLast;) {
    options.bucket_bytes = size;
    Plan plan = ddp(profile, network, options);
    int64_t smallest = kLast;
    for (const Op& op : plan.ops()) {
      if (const int64_t bytes = plan.bytes(op); bytes >= size) smallest = std::min(smallest, bytes);
    }
    if (smallest < kLast) {
      const auto grown = static_cast<int64_t>(static_cast<double>(smallest) * growth);
      size = smallest + 1 + grown;
    } else {
      size = kLast;
    }
    found(std::move(plan));
  }
  if (growth == 0) return;
  for (const int64_t size : tuned_sizes()) {
    options.bucket_bytes = size;
    found(ddp(profile, network, options));
  }
}

void bytescheduler_sizes(const Profile& profile, const NetworkModel& network, PolicyOptions options,
                         const std::function<void(Plan)>& found) {
  int64_t largest = 0;
  for (const TensorSpec& t : profile.tensors) {
    largest = std::max(largest, t.numel * itemsize(t.dtype));
  }
  for (const int64_t partition : tuned_sizes()) {
    options.partition_bytes = partition;
    if (bytescheduler_parts(profile, options) > kMostTunedParts) continue;
    for (const int64_t credit : tuned_sizes()) {
      if (credit < partition) continue;
      options.credit_bytes = credit;
      found(bytescheduler(profile, network, options));
      if (credit >= profile.bytes()) break;  // all is in flight
    }
    if (partition >= largest) break;  // nothing is split
  }
}

}  // namespace

const std::vector<int64_t>& tuned_sizes() {
  static const std::vector<int64_t> sizes = [] {
    std::vector<int64_t> out;
    for (int k = 0; k <= 16; ++k) {
      out.push_back(std::llround(std::exp2(20 + 0.5 * k)));
    }
    return out;
  }();
  return sizes;
}

void for_each_rival(const Profile& profile, const NetworkModel& network,
                    const PolicyOptions& options, const std::function<void(Plan)>& found) {
  const bool coded = !options.codec_of.empty();
  for (const auto& [name, policy] : policies()) {
    if (name == "auto" || (options.sharded && !policy.shards)) continue;
    if (policy.count_parts && policy.count_parts(profile, options) > kMostParts) continue;
    if (name == "bytecomp" && in_two_rounds(options)) continue;
    found(make_plan(name, profile, network, options));
  }
  if (options.sharded) return;
  const auto found_coded = [&](Plan plan) {
    found(coded ? with_codecs(plan, options.codec_of) : std::move(plan));
  };
  ddp_buckets(profile, network, options, found_coded);
  bytescheduler_sizes(profile, network, options, found_coded);
  if (profile.tensors.size() > kMostUnitTensors) return;
  PolicyOptions units = options;
  for (units.unit_bytes = 64 << 10; units.unit_bytes <= 32 << 20; units.unit_bytes *= 2) {
    if (units.unit_bytes == options.unit_bytes) continue;
    found_coded(us_byte(profile, network, units));
    found_coded(dcredit(profile, network, units));
  }
}

}  // namespace usbyte
