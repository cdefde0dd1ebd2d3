// SPDX-License-Identifier: Apache-2.0
#include "units.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace usbyte {

UnitJob::UnitJob(const Profile& p, const NetworkModel& network, const PolicyOptions& options)
    : profile(&p),
      cost(network.cost(Collective::all_reduce, 1)),
      backward(backward_order(p)),
      forward(forward_order(p)),
      due_s(due_times(p, options.overlap)) {
  for (const TensorSpec& t : p.tensors) {
    const int64_t size = itemsize(t.dtype);
    bytes.push_back(t.numel * size);
    unit_bytes.push_back(std::max<int64_t>(options.unit_bytes / size, 1) * size);
  }
}

Op all_reduce(const UnitJob& job, TensorSlice slice, int64_t window_bytes, bool fence) {
  const TensorSpec& t = job.profile->tensors[static_cast<size_t>(slice.tensor)];
  const int64_t size = itemsize(t.dtype);
  const Block block{t.offset + slice.begin / size, t.offset + slice.end / size};
  return {Collective::all_reduce, {block}, window_bytes, fence};
}

Backlog::Backlog(const UnitJob& job, std::span<const int> order)
    : job_(&job), order_(order), rank_(order.size()), sent_(order.size()) {
  for (size_t i = 0; i < order.size(); ++i) {
    rank_[static_cast<size_t>(order[i])] = static_cast<int>(i);
  }
  ready_.reserve(order.size());
}

void Backlog::ready(int tensor) {
  ready_.push_back(rank_[static_cast<size_t>(tensor)]);
  std::push_heap(ready_.begin(), ready_.end(), std::greater<>());
}

TensorSlice Backlog::take(double bytes) {
  const int tensor = first();
  const size_t t = static_cast<size_t>(tensor);
  const int64_t unit = job_->unit_bytes[t], begin = sent_[t];
  const double units = std::max(std::ceil(bytes / static_cast<double>(unit)), 1.0);
  // Compared as reals first: a slow network asks for few bytes, a fast one for more than fit.
  const bool all = units * static_cast<double>(unit) >= static_cast<double>(rest(tensor));
  sent_[t] = all ? job_->bytes[t] : begin + static_cast<int64_t>(units) * unit;
  if (all) {
    std::pop_heap(ready_.begin(), ready_.end(), std::greater<>());
    ready_.pop_back();
  }
  return {tensor, begin, sent_[t]};
}

}  // namespace usbyte
