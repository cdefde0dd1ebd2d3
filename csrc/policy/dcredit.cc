#include <algorithm>

#include "units.h"

namespace usbyte {

// The ops of a window share one startup, so that only the first is fenced, and each has room for
// the whole window.
Plan dcredit(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  const UnitJob job(profile, network, options);
  std::vector<Op> ops;
  std::vector<Slice> window;
  Backlog backlog(job, job.forward);
  double channel_s = 0;
  const auto post = [&] {
    if (window.empty()) return;
    int64_t bytes = 0;
    for (const Slice& s : window) bytes += s.bytes();
    for (const Slice& s : window) ops.push_back(all_reduce(job, s, bytes, &s == &window.front()));
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
