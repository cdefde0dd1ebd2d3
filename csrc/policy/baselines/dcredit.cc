// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "policy/support/merge_adjacent.h"
#include "policy/support/units.h"

namespace usbyte {
namespace {

// Ops that are posted together share one startup, so that only the first is fenced, and each has
// room for the whole window.
std::vector<Op> posted_together(const UnitJob& job, const std::vector<TensorSlice>& window,
                                int64_t bytes) {
  std::vector<Op> ops;
  for (const TensorSlice& s : window) ops.push_back(all_reduce(job, s, bytes, ops.empty()));
  return ops;
}

// Where fewer run at once, what shares a startup is one op, for each type of element; empty if to
// pack its blocks takes longer than to start up as often as there are slices.
std::vector<Op> in_one_op(const UnitJob& job, const NetworkModel& network,
                          const std::vector<TensorSlice>& window, int64_t bytes) {
  std::vector<std::pair<DType, Op>> by_dtype;
  for (const TensorSlice& s : window) {
    const DType dtype = job.profile->tensors[static_cast<size_t>(s.tensor)].dtype;
    Op op = all_reduce(job, s, bytes, by_dtype.empty());
    const auto same =
        std::ranges::find(by_dtype, dtype, [](const auto& part) { return part.first; });
    if (same == by_dtype.end()) {
      by_dtype.emplace_back(dtype, std::move(op));
    } else {
      same->second.blocks.push_back(op.blocks.front());
    }
  }
  std::vector<Op> ops;
  double packed_bytes = 0;
  for (auto& [dtype, op] : by_dtype) {
    op.blocks = merge_adjacent(std::move(op.blocks));
    for (const Block& b : op.blocks) {
      if (op.blocks.size() > 1) packed_bytes += static_cast<double>(b.numel() * itemsize(dtype));
    }
    ops.push_back(std::move(op));
  }
  const auto saved = static_cast<double>(window.size() - ops.size());
  if (packed_bytes * network.pack_s_per_byte > saved * job.cost.alpha_s) return {};
  return ops;
}

}  // namespace

Plan dcredit(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  const UnitJob job(profile, network, options);
  std::vector<Op> ops;
  std::vector<TensorSlice> window;
  Backlog backlog(job, job.forward);
  double channel_s = 0;
  const auto post = [&] {
    if (window.empty()) return;
    int64_t bytes = 0;
    for (const TensorSlice& s : window) bytes += s.bytes();
    std::vector<Op> posted;
    if (network.concurrent > 0 && std::ssize(window) > network.concurrent) {
      posted = in_one_op(job, network, window, bytes);
    }
    if (posted.empty()) posted = posted_together(job, window, bytes);
    std::ranges::move(posted, std::back_inserter(ops));
    channel_s += job.cost.time_s(bytes);
    window.clear();
  };
  for (int next : job.backward) {
    const double boundary_s = profile.ready_s[static_cast<size_t>(next)];
    double room_s = boundary_s - channel_s - job.cost.latency_s();
    if (room_s > -job.cost.latency_s() && room_s <= 0 && !backlog.empty()) {
      window.push_back(backlog.take(0));
    }
    while (room_s > 0 && !backlog.empty()) {
      const double rest = static_cast<double>(backlog.rest(backlog.first()));
      const double rest_s = job.cost.beta_s_per_byte * rest;
      window.push_back(backlog.take(rest_s < room_s ? rest : room_s / job.cost.beta_s_per_byte));
      room_s -= rest_s;
    }
    post();
    channel_s = std::max(channel_s, boundary_s);
    backlog.ready(next);
  }
  for (int tensor : job.forward) {
    const int64_t bytes = job.bytes[static_cast<size_t>(tensor)], rest = backlog.rest(tensor);
    if (rest == 0) continue;
    window.push_back({tensor, bytes - rest, bytes});
    post();
  }
  return Plan("dcredit", profile.tensors, std::move(ops));
}

}  // namespace usbyte
