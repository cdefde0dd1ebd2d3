// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace usbyte {
namespace {

// It works on what another op has scattered.
bool is_follower(const Op& op) {
  return op.kind == Collective::all_gather ||
         (op.kind == Collective::all_reduce && op.dimension >= 0);
}

}  // namespace

Step::Step(const Plan& plan, bool hold_gathers)
    : plan_(&plan),
      to_arrive_(plan.tensors().size()),
      hold_gathers_(hold_gathers),
      next_(plan.ops().size()),
      completed_(next_),
      pending_(to_arrive_.size()) {
  const auto at = [](int i) { return static_cast<size_t>(i); };
  std::vector<std::pair<Block, int>> made_by;  // shards: the op that has done so last
  std::vector<std::pair<int, int>> ops_of, followers_of;
  ops_.reserve(plan.ops().size());
  for (const Op& op : plan.ops()) {
    const int index = static_cast<int>(ops_.size());
    const bool follows = is_follower(op);
    plan.append_tensors_of(op, tensors_of_.items);
    tensors_of_.ends.push_back(tensors_of_.items.size());
    ops_.push_back({plan.message_bytes(op), 0, op.codec != "none"});
    any_coded_ |= ops_.back().coded;
    if (op.kind != Collective::all_gather) ++reductions_;
    const bool scatters = op.kind == Collective::reduce_scatter;
    if (scatters) {
      for (Block b : op.blocks) made_by.push_back({b, index});
    } else if (op.kind == Collective::all_gather || !follows) {
      for (int t : tensors(index)) ++to_arrive_[at(t)];
    }
    if (follows) continue;
    for (int t : tensors(index)) ops_of.push_back({t, index});
    ops_.back().inputs = static_cast<int>(tensors(index).size());
  }
  ops_of_ = Lists::of(to_arrive_.size(), ops_of);
  if (made_by.empty()) return;
  std::sort(made_by.begin(), made_by.end());
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = plan.ops()[i];
    const int index = static_cast<int>(i);
    if (!is_follower(op)) continue;
    const size_t before = followers_of.size();
    for (Block b : op.blocks) {
      const auto it = std::lower_bound(made_by.begin(), made_by.end(),
                                       std::pair(b, std::numeric_limits<int>::min()));
      followers_of.push_back({it->second, index});
      if (op.kind == Collective::all_reduce) it->second = index;
    }
    const auto own = followers_of.begin() + static_cast<std::ptrdiff_t>(before);
    std::sort(own, followers_of.end());
    followers_of.erase(std::unique(own, followers_of.end()), followers_of.end());
    const bool held = hold_gathers && op.kind == Collective::all_gather;
    ops_[i].inputs = static_cast<int>(followers_of.size() - before) + (held ? 1 : 0);
  }
  followers_of_ = Lists::of(ops_.size(), followers_of);
}

std::span<const int> Step::Lists::operator[](int list) const {
  const size_t begin = ends[static_cast<size_t>(list)];
  return {items.data() + begin, ends[static_cast<size_t>(list) + 1] - begin};
}

Step::Lists Step::Lists::of(size_t count, const std::vector<std::pair<int, int>>& pairs) {
  Lists out;
  out.ends.resize(count + 1);
  for (const auto& [list, item] : pairs) ++out.ends[static_cast<size_t>(list) + 1];
  std::partial_sum(out.ends.begin(), out.ends.end(), out.ends.begin());
  std::vector<size_t> next(out.ends.begin(), out.ends.end() - 1);
  out.items.resize(pairs.size());
  for (const auto& [list, item] : pairs) out.items[next[static_cast<size_t>(list)]++] = item;
  return out;
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
  for (int op : ops_of_[tensor]) input_arrived(op);
  return {queued_, {}};
}

int Step::launch() {
  admission_.launched(ops_[next_].bytes);
  return static_cast<int>(next_++);
}

Step::Change Step::complete(int op) {
  const Op& what = plan_->ops()[static_cast<size_t>(op)];
  const Collective kind = what.kind;
  if (!coded(op)) admission_.completed(bytes(op));
  ++completed_;
  queued_.clear();
  arrived_.clear();
  if (kind != Collective::all_gather) --to_reduce_;
  const bool leaves_shards =
      kind == Collective::reduce_scatter || (kind == Collective::all_reduce && is_follower(what));
  if (leaves_shards) {
    for (int follower : followers_of_[op]) input_arrived(follower);
  } else {
    for (int t : tensors(op)) {
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
