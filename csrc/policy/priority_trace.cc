#include "priority_trace.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "usbyte/admission.h"
#include "usbyte/simulator.h"

namespace usbyte {

std::vector<Op> priority_trace(const std::vector<Part>& parts, const NetworkModel& network,
                               int64_t window_bytes, bool fence) {
  std::vector<size_t> arrivals(parts.size());
  std::iota(arrivals.begin(), arrivals.end(), size_t{0});
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [&](size_t a, size_t b) { return parts[a].ready_s < parts[b].ready_s; });

  std::vector<Op> ops;
  ops.reserve(parts.size());
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  std::queue<std::pair<double, int64_t>> in_flight;  // completion, bytes; the channel is FIFO
  Admission credit;
  Channel channel(network);
  double now = 0;
  size_t next = 0;
  while (ops.size() < parts.size()) {
    while (next < arrivals.size() && parts[arrivals[next]].ready_s <= now) {
      ready.push(arrivals[next++]);
    }
    while (!in_flight.empty() && in_flight.front().first <= now) {
      credit.completed(in_flight.front().second);
      in_flight.pop();
    }
    if (!ready.empty()) {
      const Part& part = parts[ready.top()];
      Op op{Collective::all_reduce, {part.block}, window_bytes, fence};
      if (credit.admits(op, part.bytes)) {
        credit.launched(part.bytes);
        in_flight.emplace(channel.launch(op.kind, part.bytes, credit.ops_in_flight(), now),
                          part.bytes);
        ops.push_back(std::move(op));
        ready.pop();
        continue;
      }
    }
    const bool arrival = next < arrivals.size();
    if (!in_flight.empty() &&
        (!arrival || in_flight.front().first < parts[arrivals[next]].ready_s)) {
      now = in_flight.front().first;
    } else if (arrival) {
      now = parts[arrivals[next]].ready_s;
    }
  }
  return ops;
}

}  // namespace usbyte
