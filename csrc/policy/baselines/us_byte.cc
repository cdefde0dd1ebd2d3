// SPDX-License-Identifier: Apache-2.0
#include "us_byte.h"

#include <algorithm>

namespace usbyte {
namespace {

double ready_s(const UnitJob& job, int tensor) {
  return job.profile->ready_s[static_cast<size_t>(tensor)];
}

void append(const UnitJob& job, UsByteSchedule& schedule, TensorSlice slice, double start_s) {
  const size_t t = static_cast<size_t>(slice.tensor);
  const double end_s = start_s + job.cost.time_s(slice.bytes());
  schedule.sends.push_back({slice, start_s, end_s});
  schedule.channel_s = end_s;
  schedule.rest[t] = job.bytes[t] - slice.end;
  if (schedule.rest[t] == 0) {
    schedule.delay_s = std::max(schedule.delay_s, end_s - job.due_s[t]);
  }
}

UsByteSchedule both_phases(const UnitJob& job, std::span<const int> order) {
  UsByteSchedule schedule = us_byte_phase1(job, order);
  us_byte_phase2(job, schedule);
  return schedule;
}

}  // namespace

UsByteSchedule us_byte_phase1(const UnitJob& job, std::span<const int> order) {
  UsByteSchedule schedule{{}, job.bytes};
  schedule.sends.reserve(2 * order.size());
  Backlog backlog(job, order);
  double& channel_s = schedule.channel_s;
  for (int next : job.backward) {
    const double boundary_s = ready_s(job, next);
    while (channel_s < boundary_s && !backlog.empty()) {
      const int tensor = backlog.first();
      // The op before goes on if it is of the same tensor: the channel has not been idle since.
      const bool extend = !schedule.sends.empty() && schedule.sends.back().slice.tensor == tensor;
      // For bytes beyond those that the op has already.
      double room_s = boundary_s - channel_s - job.cost.latency_s();
      if (extend) {
        const Send& last = schedule.sends.back();
        room_s = boundary_s - last.start_s - job.cost.latency_s() -
                 job.cost.beta_s_per_byte * static_cast<double>(last.slice.bytes());
      }
      double bytes = static_cast<double>(backlog.rest(tensor));
      if (room_s < 0) {
        bytes = 0;  // one unit
      } else if (room_s < job.cost.beta_s_per_byte * bytes) {
        bytes = room_s / job.cost.beta_s_per_byte;
      }
      TensorSlice slice = backlog.take(bytes);
      double start_s = channel_s;
      if (extend) {
        slice.begin = schedule.sends.back().slice.begin;
        start_s = schedule.sends.back().start_s;
        schedule.sends.pop_back();
      }
      append(job, schedule, slice, start_s);
    }
    channel_s = std::max(channel_s, boundary_s);
    backlog.ready(next);
  }
  return schedule;
}

void us_byte_phase2(const UnitJob& job, UsByteSchedule& schedule) {
  for (int tensor : job.forward) {
    const size_t t = static_cast<size_t>(tensor);
    if (schedule.rest[t] > 0) {
      append(job, schedule, {tensor, job.bytes[t] - schedule.rest[t], job.bytes[t]},
             schedule.channel_s);
    }
  }
}

std::vector<int> us_byte_priorities(const UnitJob& job) {
  std::vector<int> order = job.forward;
  const size_t count = order.size();
  std::vector<size_t> place(count);  // by tensor: where `order` has it
  const auto number = [&] {
    for (size_t i = 0; i < count; ++i) place[static_cast<size_t>(order[i])] = i;
  };
  number();
  UsByteSchedule best = both_phases(job, order);
  for (size_t l = 0; l + 1 < count && best.delay_s > 0; ++l) {
    const int tensor = job.backward[l];
    const auto first = std::find_if(best.sends.begin(), best.sends.end(),
                                    [&](const Send& s) { return s.slice.tensor == tensor; });
    if (first->start_s >= ready_s(job, job.backward.back())) continue;  // not in phase 1
    const double whole_s = first->start_s + job.cost.time_s(job.bytes[static_cast<size_t>(tensor)]);
    const size_t from = place[static_cast<size_t>(tensor)];
    size_t to = from, k = l;
    while (k + 1 < count && ready_s(job, job.backward[k + 1]) < whole_s) {
      to = std::min(to, place[static_cast<size_t>(job.backward[++k])]);
    }
    if (to == from) continue;
    std::vector<int> candidate = order;
    const auto at = [&](size_t i) { return candidate.begin() + static_cast<std::ptrdiff_t>(i); };
    std::rotate(at(to), at(from), at(from + 1));
    UsByteSchedule schedule = both_phases(job, candidate);
    if (schedule.delay_s < best.delay_s) {
      order = std::move(candidate);
      best = std::move(schedule);
      number();
      l = k;
    }
  }
  return order;
}

Plan us_byte(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  const UnitJob job(profile, network, options);
  const UsByteSchedule schedule = both_phases(job, us_byte_priorities(job));
  std::vector<Op> ops;
  for (const Send& send : schedule.sends) {
    ops.push_back(all_reduce(job, send.slice, send.slice.bytes(), true));
  }
  return Plan("us-byte", profile.tensors, std::move(ops));
}

}  // namespace usbyte
