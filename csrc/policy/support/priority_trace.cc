// SPDX-License-Identifier: Apache-2.0
#include "priority_trace.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>

#include "plan/step.h"
#include "simulator/channel.h"

namespace usbyte {

std::vector<Op> priority_trace(const std::vector<ReadyBlock>& parts, const NetworkModel& network,
                               int64_t window_bytes, bool fence) {
  std::vector<size_t> arrivals(parts.size());
  std::iota(arrivals.begin(), arrivals.end(), size_t{0});
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [&](size_t a, size_t b) { return parts[a].ready_s < parts[b].ready_s; });

  std::vector<Op> ops;
  ops.reserve(parts.size());
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  std::vector<int64_t> launched_bytes;  // by op
  Admission credit;
  Channel channel(network);
  double now = 0;
  size_t next = 0;
  while (ops.size() < parts.size()) {
    while (next < arrivals.size() && parts[arrivals[next]].ready_s <= now) {
      ready.push(arrivals[next++]);
    }
    while (channel.next_s() <= now) {
      if (const int op = channel.advance(); op >= 0) {
        credit.completed(launched_bytes[static_cast<size_t>(op)]);
      }
    }
    if (!ready.empty()) {
      const ReadyBlock& part = parts[ready.top()];
      Op op{Collective::all_reduce, {part.block}, window_bytes, fence};
      if (credit.admits(op, part.bytes)) {
        credit.launched(part.bytes);
        channel.launch(static_cast<int>(ops.size()), op.kind, part.bytes, now);
        launched_bytes.push_back(part.bytes);
        ops.push_back(std::move(op));
        ready.pop();
        continue;
      }
    }
    const bool arrival = next < arrivals.size();
    now = std::min(channel.next_s(),
                   arrival ? parts[arrivals[next]].ready_s : std::numeric_limits<double>::max());
  }
  return ops;
}

}  // namespace usbyte
