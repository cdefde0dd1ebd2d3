// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "flight_recorder.h"
#include "plan/step.h"
#include "usbyte/plan.h"
#include "usbyte/sparse.h"
#include "usbyte/step_record.h"

namespace usbyte {

/// The current step on the host: which gradients are ready, which op is launched next, which ops
/// have completed, and when. Not thread-safe.
///
/// Ops are launched by one thread at a time: the one that has called `begin_launching` launches all
/// that can be launched until it calls `end_launching`, also what others make launchable meanwhile.
class LaunchQueue {
 public:
  /// `plan` outlives it. Steps are numbered from `steps_before` + 1 on.
  LaunchQueue(const Plan& plan, std::shared_ptr<const PlanIndex> index, bool hold_gathers,
              int64_t steps_before);

  /// Throws UsageError unless the step has ended and all its ops have completed.
  void check_can_begin() const;
  void begin_step();
  /// Throws UsageError if the gradient must not become ready; else notes that it does now.
  void begin_ready(int tensor);
  /// The ops that wait for nothing any more now that the gradient is there.
  std::span<const int> end_ready(int tensor);
  /// Throws UsageError if a gradient is missing.
  void end_backward();
  /// Throws UsageError if all_gathers are not held, have been released, or not everything is
  /// reduced; else they count as released.
  void begin_release();
  /// The all_gathers that wait for nothing any more now that what they send is there.
  std::span<const int> end_release();

  bool in_backward() const { return in_backward_; }
  /// Backward is closed and all ops have completed.
  bool idle() const { return !in_backward_ && step_.drained(); }
  /// The host waits for nothing but `release_gathers`.
  bool awaits_release() const { return hold_gathers_ && step_.reduced() && !released_; }
  std::vector<int> unready() const;
  const Step& step() const { return step_; }

  /// Notes that `op` waits for nothing any more.
  void queued(int op, double now_s) { record_.queued_s[static_cast<size_t>(op)] = now_s; }
  void encoded(int op) { step_.encoded(op); }
  /// Puts the next op in flight and returns it.
  int launch();
  /// The network has done its part for `op`, which has a codec.
  void received(int op) { step_.received(op); }
  /// `op` has completed. Returns the ops that wait for nothing any more.
  std::span<const int> complete(int op, double now_s);
  void fail(int op) { step_.fail(op); }

  bool launching() const { return launching_; }
  void begin_launching() { launching_ = true; }
  void end_launching() { launching_ = false; }

  /// Waiters have something to look at. They are woken after the next launch: a waiter that goes on
  /// takes the core, or Python's lock, from the thread that keeps the network busy.
  bool waiters_pending() const { return waiters_pending_; }
  void waiters_signaled() { waiters_pending_ = false; }

  /// The oldest op that has not completed.
  int oldest() const { return static_cast<int>(oldest_); }
  /// Since when the oldest op in flight has been the next to complete; nothing without one. Ops may
  /// queue inside the backend, so that counts only if nothing completes.
  std::optional<double> waiting_since() const;
  /// Whether a warning was given about what is in flight.
  bool warned() const { return warned_; }
  void set_warned() { warned_ = true; }
  /// Whether there was one; forgets it.
  bool take_warned() { return std::exchange(warned_, false); }

  /// Steps begun so far.
  int64_t number() const { return record_.step; }
  const StepRecord& record() const { return record_; }
  void add_wait(int tensor, double start_s, double end_s) {
    record_.waits.push_back({tensor, {start_s, end_s}});
  }
  void add_update(const std::vector<int>& tensors, double start_s, double end_s) {
    record_.updates.push_back({tensors, {start_s, end_s}});
  }
  void add_pass(const std::string& name, double start_s, double end_s) {
    record_.passes.push_back({name, {start_s, end_s}});
  }
  void add_traffic(int op, const SparseTraffic& traffic) { record_.sparse[op] = traffic; }

  /// An op was seen to end, of this step or of one before.
  void flight_done(int64_t step, int op, double now_s) { flights_.done(step, op, now_s); }
  nlohmann::ordered_json flights(double now_s) const;

 private:
  const Plan& plan_;
  const bool hold_gathers_;
  Step step_;
  StepRecord record_;
  FlightRecorder flights_;
  bool in_backward_ = false;
  bool released_ = true;  // the all_gathers of this step, if they are held
  int ready_count_ = 0;
  bool launching_ = false;
  bool waiters_pending_ = false;
  size_t oldest_;
  double last_done_s_ = 0;  // when an op last completed
  bool warned_ = false;
};

}  // namespace usbyte
