// SPDX-License-Identifier: Apache-2.0
#include "usbyte/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <queue>
#include <utility>

#include "channel.h"
#include "coding_thread.h"
#include "mesh_simulator.h"
#include "plan/dimension_path.h"
#include "plan/step.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// So many ops in flight have costs of their own.
int windows(const NetworkModel& network) {
  return static_cast<int>(std::max(
      {network.all_reduce.size(), network.reduce_scatter.size(), network.all_gather.size()}));
}

}  // namespace

Simulator::Simulator(const Profile& profile, NetworkModel network, Overlap overlap, bool sharded,
                     CodecCosts costs)
    : profile_(&profile),
      network_(std::move(network)),
      codec_costs_(std::move(costs)),
      overlap_(overlap),
      sharded_(sharded),
      iteration_s_(profile.iteration_s()) {
  profile.validate();
  network_.validate();
  backward_order_ = backward_order(profile);
  due_s_ = due_times(profile, overlap);
  arrived_s_.resize(due_s_.size());
  if (!sharded) return;
  if (overlap != Overlap::forward) {
    throw UsageError("simulator: a sharded optimizer needs overlap forward");
  }
  shard_update_s_ = profile.update_s / network_.ranks;
  iteration_s_ += shard_update_s_ - profile.update_s;
  for (size_t t = 0; t < due_s_.size(); ++t) due_s_[t] = iteration_s_ + profile.need_s[t];
}

double Simulator::lateness_s(const Plan& plan) {
  run(plan, nullptr);
  double lateness = due_s_.empty() ? 0 : -kNever;
  for (size_t t = 0; t < due_s_.size(); ++t) {
    lateness = std::max(lateness, arrived_s_[t] - due_s_[t]);
  }
  // The forward pass begins after the update, and what is due with it.
  if (reduced_late_s_ > 0) lateness = std::max(lateness, reduced_late_s_);
  return lateness;
}

Prediction Simulator::predict(const Plan& plan) {
  if (network_.topology) check_dimensions(plan, *network_.topology);
  const double step = step_s(plan);
  StepRecord record;
  run(plan, &record);
  const Profile& p = *profile_;
  if (overlap_ == Overlap::backward) {
    const double end = p.backward_end_s();
    for (int t : backward_order_) {
      const double arrived = arrived_s_[static_cast<size_t>(t)];
      if (arrived > end) record.waits.push_back({t, {end, arrived}});
    }
  } else {
    const bool updates_apart = !sharded_ && p.bytes() > 0;
    const double s_per_byte = updates_apart ? p.update_s / static_cast<double>(p.bytes()) : 0;
    double delay = reduced_late_s_, need_s = -1, update_s = 0;
    for (int t : forward_order(p)) {
      const size_t i = static_cast<size_t>(t);
      const double asked = due_s_[i] + delay;
      delay = std::max(delay, arrived_s_[i] - due_s_[i]);
      const double passed = due_s_[i] + delay;
      if (passed > asked) record.waits.push_back({t, {asked, passed}});
      const TensorSpec& spec = p.tensors[i];
      if (!updates_apart) continue;
      if (p.need_s[i] != need_s) {
        record.updates.push_back({});
        need_s = p.need_s[i];
        update_s = 0;
      }
      update_s += s_per_byte * static_cast<double>(spec.numel * itemsize(spec.dtype));
      record.updates.back().first.push_back(t);
      record.updates.back().second = {passed, passed + update_s};
    }
  }
  return {step, arrived_s_, std::move(record)};
}

void Simulator::run(const Plan& plan, StepRecord* record) {
  codec_costs_.by_spec.empty() ? play<false>(plan, record) : play<true>(plan, record);
}

template <bool kCodes>
void Simulator::play(const Plan& plan, StepRecord* record) {
  if (plan.tensors().size() != due_s_.size()) {
    throw UsageError("simulator: the plan has " + std::to_string(plan.tensors().size()) +
                     " tensors, the profile " + std::to_string(due_s_.size()));
  }
  const size_t count = plan.ops().size();
  if (record) {
    record->ready_s = profile_->ready_s;
    record->queued_s.assign(count, 0);
    record->launched_s.assign(count, 0);
    record->done_s.assign(count, 0);
  }
  ops_ += static_cast<int64_t>(count);
  Step step(plan, sharded_);
  step.begin();
  reduced_late_s_ = 0;
  double release = kNever;  // when the shards have been updated
  bool released = !sharded_;
  Channel channel(network_);
  std::optional<CodingThread> coding;
  if constexpr (kCodes) coding.emplace(plan, codec_costs_, network_);
  size_t next_ready = 0;  // in backward_order_
  double now = 0;
  const auto queued = [&](std::span<const int> ops) {
    for (int op : ops) {
      if (!step.coded(op)) continue;
      if constexpr (kCodes) {
        coding->put({op, false}, now);
      } else {
        step.encoded(op);
      }
    }
    if (!record) return;
    for (int op : ops) record->queued_s[static_cast<size_t>(op)] = now;
  };
  while (!step.drained()) {
    while (step.launchable()) {
      const int op = step.launch();
      const size_t i = static_cast<size_t>(op);
      const Op& what = plan.ops()[i];
      if (what.dimension >= 0) {
        const DimensionCost cost = dimension_cost(plan, what, mesh());
        channel.launch_for(op, cost.startup_s, cost.transfer_s, now);
      } else if (what.route) {
        // Phases of the next one follow this one's on each dimension, so that hardly any overlap.
        const Topology through = with_startups(mesh(), what.blocks.size());
        const auto bytes = static_cast<double>(plan.bytes(what));
        channel.launch_for(op, 0, simulate_schedule(through, *what.route, bytes), now);
      } else {
        const auto [kind, bytes] = plan.traffic(what, network_.ranks);
        channel.launch(op, kind, bytes, now, what.blocks.size() > 1 && !step.coded(op));
      }
      if (record) record->launched_s[i] = now;
    }
    const double ready = next_ready < backward_order_.size()
                             ? profile_->ready_s[static_cast<size_t>(backward_order_[next_ready])]
                             : kNever;
    const double moves = channel.next_s();
    const double codes = kCodes ? coding->next_s() : kNever;
    now = std::min({ready, moves, release});
    if constexpr (kCodes) now = std::min(now, codes);
    if (now == kNever) {
      throw PlanError("simulator: a sharded plan gathers before everything is reduced");
    }
    int over = -1;  // an op
    if (now == release) {
      release = kNever;
      queued(step.release_gathers().queued);
    } else if (moves <= ready && (!kCodes || moves <= codes)) {
      over = channel.advance();
      if (over >= 0 && step.coded(over)) {
        step.received(over);
        if constexpr (kCodes) coding->put({std::exchange(over, -1), true}, now);
      }
    } else if (!kCodes || ready <= codes) {
      queued(step.ready(backward_order_[next_ready++]).queued);
    } else if (coding->advance()) {
      const CodingThread::Task task = coding->ended();
      if (task.decodes) {
        over = task.op;
      } else {
        step.encoded(task.op);
      }
    }
    if (over < 0) continue;
    end_s_ = now;
    if (record) record->done_s[static_cast<size_t>(over)] = now;
    const Step::Change change = step.complete(over);
    queued(change.queued);
    for (int t : change.arrived) arrived_s_[static_cast<size_t>(t)] = now;
    if (!released && step.reduced()) {
      released = true;
      const double end = profile_->backward_end_s();
      reduced_late_s_ = std::max(now - end, 0.0);
      release = end + reduced_late_s_ + shard_update_s_;
    }
  }
}

const Topology& Simulator::mesh() const {
  if (network_.topology) return *network_.topology;
  throw UsageError("simulator: a plan has routes or dimensions, but the network no dimensions");
}

double Simulator::bytes_bound_s() const {
  return ending(sharded_ ? sharded_bound_s({}) : bound_s({}));
}

double Simulator::bound_s() const {
  const Latencies all_reduce = latencies(Collective::all_reduce);
  const Latencies scatter = latencies(Collective::reduce_scatter);
  const Latencies gather = latencies(Collective::all_gather);
  if (sharded_) return ending(sharded_bound_s({scatter, gather}));
  if (network_.topology) return bytes_bound_s();  // routes have no startups of their own
  Latencies least{std::min(all_reduce.first_byte_s, scatter.first_byte_s),
                  std::min(all_reduce.op_s, scatter.op_s + gather.op_s)};
  if (network_.one_shot.most_bytes > 0) {
    least = {0, std::min(least.op_s, network_.one_shot.latency_s)};
  }
  return ending(bound_s(least));
}

Simulator::Latencies Simulator::latencies(Collective kind) const {
  Latencies least{kNever, kNever};
  for (int k = 1; k <= windows(network_); ++k) {
    const AlphaBeta cost = network_.cost(kind, k);
    least.first_byte_s = std::min(least.first_byte_s, cost.latency_s());
    least.op_s = std::min(least.op_s, cost.alpha_s);
  }
  return least;
}

double Simulator::bound_s(const Latencies& startup) const {
  const double s_per_byte = network_.least_beta();
  const auto later = [&](int a, int b) {
    return due_s_[static_cast<size_t>(a)] > due_s_[static_cast<size_t>(b)];
  };
  std::priority_queue<int, std::vector<int>, decltype(later)> ready(later);
  std::vector<double> rest_s(due_s_.size());
  double now = 0, delay = 0;
  for (size_t next = 0; next < backward_order_.size() || !ready.empty();) {
    const double release =
        next < backward_order_.size()
            ? profile_->ready_s[static_cast<size_t>(backward_order_[next])] + startup.first_byte_s
            : kNever;
    if (ready.empty()) now = std::max(now, release);
    if (next < backward_order_.size() && release <= now) {
      const auto t = static_cast<size_t>(backward_order_[next++]);
      const TensorSpec& spec = profile_->tensors[t];
      if (spec.numel == 0) {  // sparse: sent by its own scheme, with other startups
        delay = std::max(delay, profile_->ready_s[t] - due_s_[t]);
        continue;
      }
      rest_s[t] = s_per_byte * static_cast<double>(spec.numel * itemsize(spec.dtype));
      ready.push(static_cast<int>(t));
      delay = std::max(delay, profile_->ready_s[t] + startup.op_s - due_s_[t]);
      continue;
    }
    const size_t t = static_cast<size_t>(ready.top());
    if (now + rest_s[t] <= release) {
      now += rest_s[t];
      delay = std::max(delay, now - due_s_[t]);
      ready.pop();
    } else {
      rest_s[t] -= release - now;
      now = release;
    }
  }
  return iteration_s_ + delay;
}

double Simulator::ending(double bound_s) const {
  if (std::isfinite(bound_s)) return bound_s;
  throw UsageError("network: " + std::to_string(profile_->bytes()) + " bytes would never end");
}

// Scatters keep the channel busy from the first gradient on; gathers follow in due order.
double Simulator::sharded_bound_s(const ShardLatencies& startups) const {
  const auto transfer_s = [&](Collective kind, int tensor) {
    double s_per_byte = kNever;
    for (int k = 1; k <= windows(network_); ++k) {
      s_per_byte = std::min(s_per_byte, network_.cost(kind, k).beta_s_per_byte);
    }
    const TensorSpec& spec = profile_->tensors[static_cast<size_t>(tensor)];
    return s_per_byte * static_cast<double>(spec.numel * itemsize(spec.dtype));
  };
  const auto& [scatter, gather] = startups;
  double now = 0, end_s = 0;
  for (int t : backward_order_) {
    const double ready_s = profile_->ready_s[static_cast<size_t>(t)];
    now = std::max(now, ready_s + scatter.first_byte_s) + transfer_s(Collective::reduce_scatter, t);
    end_s = std::max({end_s, now, ready_s + scatter.op_s});
  }
  const double backward_s = profile_->backward_end_s();
  double delay = std::max(end_s - backward_s, 0.0);
  const double updated_s = backward_s + delay + shard_update_s_;
  now = updated_s + gather.first_byte_s;
  for (int t : forward_order(*profile_)) {
    now += transfer_s(Collective::all_gather, t);
    const double arrived_s = std::max(now, updated_s + gather.op_s);
    delay = std::max(delay, arrived_s - due_s_[static_cast<size_t>(t)]);
  }
  return iteration_s_ + delay;
}

}  // namespace usbyte
