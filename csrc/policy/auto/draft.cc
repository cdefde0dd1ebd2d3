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
    order.emplace_back(due_of({Collective::all_gather, draft.ops[i]}, layout, costs), i);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::vector<Block>> out;
  for (const auto& [due, i] : order) out.push_back(draft.ops[i]);
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
  for (const auto& blocks : draft.ops) {
    for (Block b : blocks) {
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

void append(std::vector<Op>& ops, Collective kind, const std::vector<std::vector<Block>>& all,
            int in_flight, const OneShot& one_shot, const Plan& layout) {
  int64_t launched_bytes = 0;
  std::vector<int64_t> ends;  // of those that do not go in one shot, in bytes launched
  const auto count = [&](const Op& op) {
    const int64_t bytes = layout.bytes(op);
    launched_bytes += bytes;
    if (!one_shot.takes(op.kind, bytes)) ends.push_back(launched_bytes);
  };
  for (const Op& op : ops) count(op);
  for (const auto& blocks : all) {
    Op op{kind, blocks, 1};
    count(op);
    const auto outside = std::ssize(ends) - in_flight - 1;  // the last one before the window
    op.window_bytes = launched_bytes - (outside >= 0 ? ends[static_cast<size_t>(outside)] : 0);
    ops.push_back(std::move(op));
  }
}

}  // namespace

Plan build(const Draft& draft, const Plan& layout, const DraftCosts& costs) {
  std::vector<Op> ops;
  if (draft.split) {
    append(ops, Collective::reduce_scatter, draft.ops, draft.in_flight, costs.one_shot, layout);
    append(ops, Collective::all_gather, gathers(draft, layout, costs), draft.in_flight,
           costs.one_shot, layout);
  } else {
    append(ops, Collective::all_reduce, draft.ops, draft.in_flight, costs.one_shot, layout);
  }
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
