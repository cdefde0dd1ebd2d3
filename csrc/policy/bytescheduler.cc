#include <algorithm>
#include <queue>

#include "usbyte/admission.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

struct Part {
  Block block;
  int64_t bytes;
  double ready_s;
};

// Near-equal parts of at most `partition_bytes`, in forward order: the index is the priority.
std::vector<Part> partition(const Profile& profile, int64_t partition_bytes) {
  std::vector<Part> parts;
  for (int i : forward_order(profile)) {
    const TensorSpec& t = profile.tensors[static_cast<size_t>(i)];
    const int64_t limit = std::max<int64_t>(partition_bytes / itemsize(t.dtype), 1);
    const int64_t count = (t.numel + limit - 1) / limit;
    for (int64_t k = 0; k < count; ++k) {
      const Block block{t.offset + t.numel * k / count, t.offset + t.numel * (k + 1) / count};
      parts.push_back(
          {block, block.numel() * itemsize(t.dtype), profile.ready_s[static_cast<size_t>(i)]});
    }
  }
  return parts;
}

}  // namespace

Plan bytescheduler(const Profile& profile, const NetworkModel& network,
                   const PolicyOptions& options) {
  const std::vector<Part> parts = partition(profile, options.partition_bytes);
  std::vector<size_t> arrivals(parts.size());
  for (size_t i = 0; i < arrivals.size(); ++i) arrivals[i] = i;
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [&](size_t a, size_t b) { return parts[a].ready_s < parts[b].ready_s; });

  std::vector<Op> ops;
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;  // nearest input first
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
      Op op{Collective::all_reduce, {part.block}, options.credit_bytes, false};
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
  return Plan("bytescheduler", profile.tensors, std::move(ops));
}

}  // namespace usbyte
