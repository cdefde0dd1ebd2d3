#include "usbyte/step.h"

#include <map>

namespace usbyte {

Step::Step(const Plan& plan, bool hold_gathers)
    : plan_(&plan),
      ops_of_(plan.tensors().size()),
      to_arrive_(plan.tensors().size()),
      hold_gathers_(hold_gathers),
      next_(plan.ops().size()),
      completed_(next_),
      pending_(to_arrive_.size()) {
  std::map<Block, size_t> scattered_by;
  ops_.reserve(plan.ops().size());
  for (size_t i = 0; i < plan.ops().size(); ++i) {
    const Op& op = plan.ops()[i];
    const int index = static_cast<int>(i);
    Info info{plan.bytes(op), plan.tensors_of(op), {}, 0};
    if (op.kind == Collective::all_gather) {
      if (hold_gathers) ++info.inputs;
      for (Block b : op.blocks) {
        std::vector<int>& gathers = ops_[scattered_by.at(b)].gathers;
        if (gathers.empty() || gathers.back() != index) {
          gathers.push_back(index);
          ++info.inputs;
        }
      }
    } else {
      ++reductions_;
      info.inputs = static_cast<int>(info.tensors.size());
      for (int t : info.tensors) ops_of_[static_cast<size_t>(t)].push_back(index);
    }
    if (op.kind == Collective::reduce_scatter) {
      for (Block b : op.blocks) scattered_by[b] = i;
    } else {
      for (int t : info.tensors) ++to_arrive_[static_cast<size_t>(t)];
    }
    ops_.push_back(std::move(info));
  }
}

void Step::begin() {
  admission_ = {};
  next_ = completed_ = 0;
  to_reduce_ = reductions_;
  inputs_.resize(ops_.size());
  for (size_t i = 0; i < ops_.size(); ++i) inputs_[i] = ops_[i].inputs;
  pending_ = to_arrive_;
}

Step::Change Step::ready(int tensor) {
  queued_.clear();
  for (int op : ops_of_[static_cast<size_t>(tensor)]) input_arrived(op);
  return {queued_, {}};
}

int Step::launch() {
  admission_.launched(ops_[next_].bytes);
  return static_cast<int>(next_++);
}

Step::Change Step::complete(int op) {
  const Info& info = ops_[static_cast<size_t>(op)];
  admission_.completed(info.bytes);
  ++completed_;
  queued_.clear();
  arrived_.clear();
  if (plan_->ops()[static_cast<size_t>(op)].kind != Collective::all_gather) --to_reduce_;
  if (plan_->ops()[static_cast<size_t>(op)].kind == Collective::reduce_scatter) {
    for (int gather : info.gathers) input_arrived(gather);
  } else {
    for (int t : info.tensors) {
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
