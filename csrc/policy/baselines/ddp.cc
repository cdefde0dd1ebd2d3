// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <map>

#include "usbyte/policy.h"

namespace usbyte {

// Buckets are cut along the flat buffer from its end to its start, which is the order of backward
// in all but unusual models, and launched in the order in which they fill. Any number may be in
// flight, as DDP launches each bucket when it is full.
Plan ddp(const Profile& profile, const NetworkModel&, const PolicyOptions& options) {
  struct Bucket {
    Block block;
    int64_t bytes;
    double ready_s;
  };
  std::vector<Bucket> buckets;
  std::map<DType, int> buckets_of;  // the first of each is small
  for (size_t i = profile.tensors.size(); i-- > 0;) {
    const TensorSpec& t = profile.tensors[i];
    const int64_t bytes = t.numel * itemsize(t.dtype);
    int& of_dtype = buckets_of[t.dtype];
    const int64_t limit = of_dtype <= 1 ? options.first_bucket_bytes : options.bucket_bytes;
    if (!buckets.empty() && buckets.back().bytes < limit &&
        profile.tensors[i + 1].dtype == t.dtype) {
      Bucket& open = buckets.back();
      open.block.begin = t.offset;
      open.bytes += bytes;
      open.ready_s = std::max(open.ready_s, profile.ready_s[i]);
    } else {
      buckets.push_back({{t.offset, t.end()}, bytes, profile.ready_s[i]});
      ++of_dtype;
    }
  }
  std::stable_sort(buckets.begin(), buckets.end(),
                   [](const Bucket& a, const Bucket& b) { return a.ready_s < b.ready_s; });
  std::vector<Op> ops;
  for (const Bucket& b : buckets) {
    ops.push_back({Collective::all_reduce, {b.block}, std::numeric_limits<int64_t>::max(), false});
  }
  return Plan("ddp", profile.tensors, std::move(ops));
}

}  // namespace usbyte
