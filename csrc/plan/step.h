// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "usbyte/plan.h"

namespace usbyte {

class PlanIndex;

/// The credit window: decides whether the next op may start beside those in flight. Engine and
/// simulator share it, so that a prediction means this plan under these rules. Not thread-safe; the
/// owner guards it.
class Admission {
 public:
  /// True if `op` of `bytes` may start now. An op larger than its window is admitted when nothing
  /// is in flight: no op starves and credit never goes negative.
  bool admits(const Op& op, int64_t bytes) const {
    if (ops_ == 0) return true;
    return !op.fence && bytes_ + bytes <= op.window_bytes;
  }
  void launched(int64_t bytes) {
    ++ops_;
    bytes_ += bytes;
  }
  void completed(int64_t bytes) {
    --ops_;
    bytes_ -= bytes;
  }
  int ops_in_flight() const { return ops_; }

 private:
  int ops_ = 0;
  int64_t bytes_ = 0;
};

/// The state machine of one iteration: which op goes next, what it still waits for, when a tensor
/// has arrived. The engine drives it in real time and the simulator in predicted time, so that both
/// follow the same rules. Not thread-safe; the owner guards it.
///
/// Ops are launched strictly in plan order, each when all its bytes are ready and its window admits
/// it; an all_gather also waits for the reduce_scatter of its blocks, or for what adds up their
/// shards, which waits for that, and an op with a codec for `encoded`. A tensor has arrived when
/// every all_reduce or all_gather that touches it has completed.
class Step {
 public:
  /// What one call has brought about; valid until the next one.
  struct Change {
    std::span<const int> queued;   ///< ops that wait for no input any more
    std::span<const int> arrived;  ///< tensors
  };

  /// A step that is over. `plan` outlives it. With `hold_gathers`, no all_gather is launched before
  /// `release_gathers`: what is gathered is made from what was scattered.
  explicit Step(const Plan& plan, bool hold_gathers = false);
  /// The same, with the plan's index.
  Step(const Plan& plan, std::shared_ptr<const PlanIndex> index, bool hold_gathers);

  /// Starts over: nothing is ready, nothing in flight.
  void begin();
  /// The gradient of `tensor` is there; once in a step.
  Change ready(int tensor);
  /// True if the next op may be launched now.
  bool launchable() const {
    return next_ < ops_.size() && inputs_[next_] == 0 && (!ops_[next_].coded || encoded_[next_]) &&
           admission_.admits(plan_->ops()[next_], ops_[next_].bytes);
  }
  /// The message of `op`, which has a codec and waits for no input, is there; once in a step.
  void encoded(int op) { encoded_[static_cast<size_t>(op)] = true; }
  /// Puts the next op in flight and returns it.
  int launch();
  /// The messages for `op`, which has a codec and was in flight, are there: its window is free.
  void received(int op) { admission_.completed(bytes(op)); }
  /// `op`, which was in flight, is over; one with a codec, whose messages are there, is decoded.
  Change complete(int op);
  /// What the all_gathers send is there; once in a step, if they are held.
  Change release_gathers();
  /// `op`, which was in flight, has failed: it is over, and nothing arrives.
  void fail(int op) { admission_.completed(bytes(op)); }

  /// Ops launched and completed so far, and those between the two.
  size_t launched() const { return next_; }
  size_t completed() const { return completed_; }
  int in_flight() const { return admission_.ops_in_flight(); }
  bool drained() const { return completed_ == ops_.size(); }
  /// Every reduce_scatter and all_reduce has completed.
  bool reduced() const { return to_reduce_ == 0; }
  bool arrived(int tensor) const { return pending_[static_cast<size_t>(tensor)] == 0; }

  bool coded(int op) const { return ops_[static_cast<size_t>(op)].coded; }
  /// That a window counts.
  int64_t bytes(int op) const { return ops_[static_cast<size_t>(op)].bytes; }

 private:
  struct Info {
    int64_t bytes;
    int inputs;  // tensors, or ops that have scattered or added up its blocks, that it waits for
    bool coded;
  };

  void input_arrived(int op);

  const Plan* plan_;
  std::shared_ptr<const PlanIndex> index_;
  std::vector<Info> ops_;
  std::vector<int> to_arrive_;  // by tensor: ops after which it has arrived

  Admission admission_;
  bool hold_gathers_;
  size_t next_, completed_;
  size_t reductions_ = 0, to_reduce_ = 0;  // ops other than all_gathers; those not completed
  std::vector<int> inputs_;                // by op
  bool any_coded_ = false;
  std::vector<bool> encoded_;  // by op, if any is coded
  std::vector<int> pending_;   // by tensor
  std::vector<int> queued_, arrived_;
};

}  // namespace usbyte
