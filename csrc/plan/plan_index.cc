// SPDX-License-Identifier: Apache-2.0
#include "plan/plan_index.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace usbyte {

PlanIndex::PlanIndex(const Plan& plan) {
  const std::vector<Op>& ops = plan.ops();
  for (const Op& op : ops) {
    plan.append_tensors_of(op, tensors_of_.items());
    tensors_of_.end_list();
    shards_ |= leaves_shards(op);
  }
  const size_t tensors = plan.tensors().size();
  sent_by_ =
      Lists::inverse(tensors_of_, tensors, [&](size_t i) { return takes_gradients(ops[i]); });
  if (!shards_) return;
  brought_by_ =
      Lists::inverse(tensors_of_, tensors, [&](size_t i) { return !leaves_shards(ops[i]); });
  index_shards(plan);
}

void PlanIndex::index_shards(const Plan& plan) {
  const std::vector<Op>& ops = plan.ops();
  std::vector<std::pair<Block, int>> left_by;  // shards: the op that has left them last
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].kind != Collective::reduce_scatter) continue;
    for (Block b : ops[i].blocks) left_by.push_back({b, static_cast<int>(i)});
  }
  std::sort(left_by.begin(), left_by.end());
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<int>& items = follows_.items();
    const size_t before = items.size();
    for (size_t b = 0; !takes_gradients(ops[i]) && b < ops[i].blocks.size(); ++b) {
      const auto it =
          std::lower_bound(left_by.begin(), left_by.end(),
                           std::pair(ops[i].blocks[b], std::numeric_limits<int>::min()));
      items.push_back(it->second);
      if (leaves_shards(ops[i])) it->second = static_cast<int>(i);
    }
    const auto own = items.begin() + static_cast<std::ptrdiff_t>(before);
    std::sort(own, items.end());
    items.erase(std::unique(own, items.end()), items.end());
    follows_.end_list();
  }
  followers_of_ = Lists::inverse(follows_, ops.size(), [](size_t) { return true; });
}

template <typename Keeps>
PlanIndex::Lists PlanIndex::Lists::inverse(const Lists& of, size_t count, const Keeps& keeps) {
  const size_t lists = of.ends_.size() - 1;
  Lists out;
  out.ends_.resize(count + 1);
  for (size_t list = 0; list < lists; ++list) {
    if (!keeps(list)) continue;
    for (int item : of[static_cast<int>(list)]) ++out.ends_[static_cast<size_t>(item) + 1];
  }
  std::partial_sum(out.ends_.begin(), out.ends_.end(), out.ends_.begin());
  out.items_.resize(out.ends_.back());
  std::vector<size_t> next(out.ends_.begin(), out.ends_.end() - 1);
  for (size_t list = 0; list < lists; ++list) {
    if (!keeps(list)) continue;
    for (int item : of[static_cast<int>(list)]) {
      out.items_[next[static_cast<size_t>(item)]++] = static_cast<int>(list);
    }
  }
  return out;
}

CoArriving co_arriving(const Plan& plan) {
  const PlanIndex index(plan);
  const int count = static_cast<int>(plan.tensors().size());
  const auto ops_of = [&](int tensor) { return index.brought_by(tensor); };
  CoArriving out;
  std::map<std::vector<int>, int> groups;                 // by the ops that bring their tensors
  std::vector<std::vector<int>> members;                  // by group
  std::vector<std::vector<int>> near(plan.ops().size());  // by op: groups that it brings a part of
  for (int t = 0; t < count; ++t) {
    const std::span<const int> ops = ops_of(t);
    const auto [it, is_new] = groups.try_emplace(std::vector<int>(ops.begin(), ops.end()),
                                                 static_cast<int>(members.size()));
    if (is_new) {
      members.emplace_back();
      for (int op : ops) near[static_cast<size_t>(op)].push_back(it->second);
    }
    out.group_of.push_back(it->second);
    members[static_cast<size_t>(it->second)].push_back(t);
  }
  std::vector<int> seen(members.size(), -1);  // the group that has looked at it last
  for (size_t group = 0; group < members.size(); ++group) {
    const std::span<const int> ops = ops_of(members[group].front());
    std::vector<int>& tensors = out.tensors.emplace_back(members[group]);
    seen[group] = static_cast<int>(group);
    for (int op : ops) {
      for (int other : near[static_cast<size_t>(op)]) {
        if (std::exchange(seen[static_cast<size_t>(other)], static_cast<int>(group)) ==
            static_cast<int>(group)) {
          continue;
        }
        const std::vector<int>& its = members[static_cast<size_t>(other)];
        if (!std::ranges::includes(ops, ops_of(its.front()))) continue;
        tensors.insert(tensors.end(), its.begin(), its.end());
      }
    }
    std::ranges::sort(tensors);
  }
  return out;
}

}  // namespace usbyte
