// SPDX-License-Identifier: Apache-2.0
#include "draft.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "batching.h"

namespace usbyte {
namespace {

double due_of(const Op& op, const Plan& layout, const DraftCosts& costs) {
  double due = std::numeric_limits<double>::infinity();
  for (int t : layout.tensors_of(op)) due = std::min(due, (*costs.due_s)[static_cast<size_t>(t)]);
  return due;
}

std::vector<std::vector<Block>> as_scattered(const Draft& draft, const Plan& layout,
                                             const DraftCosts& costs) {
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < draft.ops.size(); ++i) {
    if (!draft.ops[i].split) continue;
    order.emplace_back(due_of({Collective::all_gather, draft.ops[i].blocks}, layout, costs), i);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::vector<Block>> out;
  for (const auto& [due, i] : order) out.push_back(draft.ops[i].blocks);
  return out;
}

std::vector<std::vector<Block>> gathers(const Draft& draft, const Plan& layout,
                                        const DraftCosts& costs) {
  if (draft.gathers_as_scattered) return as_scattered(draft, layout, costs);
  struct Gather {
    Block block;
    DType dtype;
    double length_s, due_s;
  };
  std::vector<Gather> gathered;
  for (const DraftOp& scattered : draft.ops) {
    if (!scattered.split) continue;
    for (Block b : scattered.blocks) {
      const Op op{Collective::all_gather, {b}};
      gathered.push_back({b, layout.dtype(b),
                          costs.gather.beta_s_per_byte * static_cast<double>(layout.bytes(op)),
                          due_of(op, layout, costs)});
    }
  }
  std::sort(gathered.begin(), gathered.end(), [](const Gather& a, const Gather& b) {
    return a.due_s != b.due_s ? a.due_s < b.due_s : a.block < b.block;
  });
  std::vector<double> length, due;
  for (const Gather& gather : gathered) {
    length.push_back(gather.length_s);
    due.push_back(gather.due_s);
  }
  const Batching batching =
      batch_exactly(length, due, costs.gather.latency_s(), costs.gather.alpha_s);
  std::vector<std::vector<Block>> out;
  for (size_t i = 0, batch = 0; i < gathered.size(); ++i) {
    const bool first =
        batch < batching.begins.size() && static_cast<int>(i) == batching.begins[batch];
    if (first) ++batch;
    if (first || gathered[i].dtype != gathered[i - 1].dtype) out.emplace_back();
    out.back().push_back(gathered[i].block);
  }
  return out;
}

// Sets the windows of ops in launch order.
void admit(std::vector<Op>& ops, int in_flight, const OneShot& one_shot, const Plan& layout) {
  int64_t launched_bytes = 0;
  std::vector<int64_t> ends;  // of those that do not go in one shot, in bytes launched
  for (Op& op : ops) {
    const int64_t bytes = layout.bytes(op);
    launched_bytes += bytes;
    if (!one_shot.takes(op.kind, bytes)) ends.push_back(launched_bytes);
    const auto outside = std::ssize(ends) - in_flight - 1;  // the last one before the window
    op.window_bytes = launched_bytes - (outside >= 0 ? ends[static_cast<size_t>(outside)] : 0);
  }
}

}  // namespace

Plan build(const Draft& draft, const Plan& layout, const DraftCosts& costs) {
  std::vector<Op> ops;
  const auto last_split = std::find_if(draft.ops.rbegin(), draft.ops.rend(),
                                       [](const DraftOp& op) { return op.split; });
  for (auto it = draft.ops.begin(); it != last_split.base(); ++it) {
    ops.push_back({it->split ? Collective::reduce_scatter : Collective::all_reduce, it->blocks, 1});
  }
  std::vector<std::vector<Block>> gathered;
  if (last_split != draft.ops.rend()) gathered = gathers(draft, layout, costs);
  auto next = gathered.begin();
  const auto gather_before = [&](double due) {
    for (; next != gathered.end(); ++next) {
      Op op{Collective::all_gather, *next, 1};
      if (due_of(op, layout, costs) > due) return;
      ops.push_back(std::move(op));
    }
  };
  for (auto it = last_split.base(); it != draft.ops.end(); ++it) {
    Op op{Collective::all_reduce, it->blocks, 1};
    if (next != gathered.end()) gather_before(due_of(op, layout, costs));
    ops.push_back(std::move(op));
  }
  gather_before(std::numeric_limits<double>::infinity());
  admit(ops, draft.in_flight, costs.one_shot, layout);
  return layout.with_ops("auto", std::move(ops));
}

void add(std::vector<Block>& blocks, Block block, const Plan& layout) {
  auto after = std::upper_bound(blocks.begin(), blocks.end(), block);
  const DType dtype = layout.dtype(block);
  if (after != blocks.begin()) {
    auto before = after - 1;
    if (before->end == block.begin && layout.dtype(*before) == dtype) {
      block.begin = before->begin;
      after = blocks.erase(before);
    }
  }
  if (after != blocks.end() && block.end == after->begin && layout.dtype(*after) == dtype) {
    after->begin = block.begin;
  } else {
    blocks.insert(after, block);
  }
}

}  // namespace usbyte
