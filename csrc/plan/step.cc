// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include <utility>

#include "plan/plan_index.h"

namespace usbyte {

Step::Step(const Plan& plan, bool hold_gathers)
    : Step(plan, std::make_shared<const PlanIndex>(plan), hold_gathers) {}

Step::Step(const Plan& plan, std::shared_ptr<const PlanIndex> index, bool hold_gathers)
    : plan_(&plan),
      index_(std::move(index)),
      hold_gathers_(hold_gathers),
      next_(plan.ops().size()),
      completed_(next_),
      pending_(plan.tensors().size()) {
  ops_.reserve(plan.ops().size());
  for (const Op& op : plan.ops()) {
    const int i = static_cast<int>(ops_.size());
    const bool gathers = op.kind == Collective::all_gather;
    const size_t released = gathers && hold_gathers ? 1 : 0;
    const size_t inputs =
        takes_gradients(op) ? index_->tensors_of(i).size() : index_->follows(i).size() + released;
    ops_.push_back({plan.message_bytes(op), static_cast<int>(inputs), op.codec != "none"});
    any_coded_ |= ops_.back().coded;
    if (!gathers) ++reductions_;
  }
  to_arrive_.reserve(pending_.size());
  for (size_t t = 0; t < pending_.size(); ++t) {
    to_arrive_.push_back(static_cast<int>(index_->brought_by(static_cast<int>(t)).size()));
  }
}

void Step::begin() {
  admission_ = {};
  next_ = completed_ = 0;
  to_reduce_ = reductions_;
  inputs_.resize(ops_.size());
  for (size_t i = 0; i < ops_.size(); ++i) inputs_[i] = ops_[i].inputs;
  pending_ = to_arrive_;
  if (any_coded_) encoded_.assign(ops_.size(), false);
}

Step::Change Step::ready(int tensor) {
  queued_.clear();
  for (int op : index_->sent_by(tensor)) input_arrived(op);
  return {queued_, {}};
}

int Step::launch() {
  admission_.launched(ops_[next_].bytes);
  return static_cast<int>(next_++);
}

Step::Change Step::complete(int op) {
  const Op& what = plan_->ops()[static_cast<size_t>(op)];
  if (!coded(op)) admission_.completed(bytes(op));
  ++completed_;
  queued_.clear();
  arrived_.clear();
  if (what.kind != Collective::all_gather) --to_reduce_;
  if (leaves_shards(what)) {
    for (int follower : index_->followers_of(op)) input_arrived(follower);
  } else {
    for (int t : index_->tensors_of(op)) {
      if (--pending_[static_cast<size_t>(t)] == 0) arrived_.push_back(t);
    }
  }
  return {queued_, arrived_};
}

Step::Change Step::release_gathers() {
  queued_.clear();
  for (size_t i = 0; hold_gathers_ && i < ops_.size(); ++i) {
    if (plan_->ops()[i].kind == Collective::all_gather) input_arrived(static_cast<int>(i));
  }
  return {queued_, {}};
}

void Step::input_arrived(int op) {
  if (--inputs_[static_cast<size_t>(op)] == 0) queued_.push_back(op);
}

}  // namespace usbyte
