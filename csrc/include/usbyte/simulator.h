// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "usbyte/codec_costs.h"
#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/profile.h"
#include "usbyte/step_record.h"

namespace usbyte {

/// An iteration as predicted. Times are seconds since its forward pass began.
struct Prediction {
  double step_s;                  ///< from one forward pass to the next, in the steady state
  std::vector<double> arrived_s;  ///< by tensor
  StepRecord record;              ///< for the timeline: ops, waits and updates
};

/// Predicts iterations of one job: backward produces gradients at the profile's times, the ops of a
/// plan follow the engine's own state machine (`Step`) over a `Channel`, and whatever waits for a
/// tensor that arrives late is delayed. All ranks are alike, so one is simulated; their number is
/// in the costs.
class Simulator {
 public:
  /// `profile` outlives it. `sharded`: each rank updates its shard between the last reduce_scatter
  /// and the first all_gather, which then carries parameters. Throws PlanError or UsageError if
  /// something is invalid.
  ///
  /// With `costs`, ops with codecs are encoded and decoded by one thread beside compute, as the
  /// engine does it, for what the costs say of their gradients as float32; messages that are
  /// gathered are decoded one after the other. Codecs that have none are an error then. Without any
  /// costs coding takes no time.
  Simulator(const Profile& profile, NetworkModel network, Overlap overlap, bool sharded = false,
            CodecCosts costs = {});

  /// Seconds of compute from one forward pass to the next.
  double iteration_s() const { return iteration_s_; }
  /// Seconds from one forward pass to the next. The plan's tensors are the profile's.
  double step_s(const Plan& plan) { return iteration_s_ + std::max(lateness_s(plan), 0.0); }
  /// The largest arrival minus due date, s; negative where every tensor has time to spare. Of two
  /// plans that hide everything, the one with the smaller lateness stands more.
  double lateness_s(const Plan& plan);
  Prediction predict(const Plan& plan);

  /// No plan is faster, whatever it does: the preemptive bound, one machine with release times
  /// `ready_s`, due dates `due_times` and the earliest due date first, at the least cost of a byte
  /// and without startups (Horn, "Some simple scheduling algorithms", 1974). Of plans without
  /// codecs: those with some send less.
  double bytes_bound_s() const;
  /// The same with the least startups, at least `bytes_bound_s`: a gradient's first byte flows no
  /// sooner than a startup after the gradient is ready, or half of one if it is scattered first,
  /// and it arrives no sooner than after the shortest op. What a step takes beyond that is up to
  /// the plan and the software, not to the network.
  double bound_s() const;

  /// When the last op of the last prediction completed.
  double end_s() const { return end_s_; }
  /// Ops simulated so far.
  int64_t ops() const { return ops_; }
  /// See `due_times`.
  const std::vector<double>& due_s() const { return due_s_; }

 private:
  void run(const Plan& plan, StepRecord* record);
  template <bool kCodes>  // with times of codecs; planners try many plans without
  void play(const Plan& plan, StepRecord* record);
  const Topology& mesh() const;

  // The least that startups take: until the first byte of an op flows, and a whole op.
  struct Latencies {
    double first_byte_s = 0, op_s = 0;
  };
  struct ShardLatencies {
    Latencies scatter, gather;
  };
  Latencies latencies(Collective kind) const;
  double bound_s(const Latencies& startup) const;
  double sharded_bound_s(const ShardLatencies& startups) const;
  double ending(double bound_s) const;

  const Profile* profile_;
  NetworkModel network_;
  CodecCosts codec_costs_;
  std::vector<int> backward_order_;
  std::vector<double> due_s_;
  Overlap overlap_;
  bool sharded_;
  double iteration_s_;
  double shard_update_s_ = 0;
  double reduced_late_s_ = 0;  // sharded: how long after backward the last reduce_scatter completes
  int64_t ops_ = 0;
  double end_s_ = 0;
  std::vector<double> arrived_s_;  // of the last run, by tensor
};

}  // namespace usbyte
