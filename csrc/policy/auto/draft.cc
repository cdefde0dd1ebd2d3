// SPDX-License-Identifier: Apache-2.0
#include "draft.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "batching.h"

namespace usbyte {
namespace {

double due_of(const Op& op, const Plan& line, const DraftCosts& costs) {
  double due = std::numeric_limits<double>::infinity();
  for (int t : line.tensors_of(op)) due = std::min(due, (*costs.due_s)[static_cast<size_t>(t)]);
  return due;
}

std::vector<std::vector<Block>> as_scattered(const Draft& draft, const Plan& line,
                                             const DraftCosts& costs) {
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < draft.ops.size(); ++i) {
    order.emplace_back(due_of({Collective::all_gather, draft.ops[i]}, line, costs), i);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::vector<Block>> out;
  for (const auto& [due, i] : order) out.push_back(draft.ops[i]);
  return out;
}

std::vector<std::vector<Block>> gathers(const Draft& draft, const Plan& line,
                                        const DraftCosts& costs) {
  if (draft.gathers_as_scattered) return as_scattered(draft, line, costs);
  struct Job {
    Block block;
    DType dtype;
    double length_s, due_s;
  };
  std::vector<Job> jobs;
  for (const auto& blocks : draft.ops) {
    for (Block b : blocks) {
      const Op op{Collective::all_gather, {b}};
      jobs.push_back({b, line.dtype(b),
                      costs.gather.beta_s_per_byte * static_cast<double>(line.bytes(op)),
                      due_of(op, line, costs)});
    }
  }
  std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) {
    return a.due_s != b.due_s ? a.due_s < b.due_s : a.block < b.block;
  });
  std::vector<double> length, due;
  for (const Job& job : jobs) {
    length.push_back(job.length_s);
    due.push_back(job.due_s);
  }
  const Batching batching =
      batch_exactly(length, due, costs.gather.latency_s(), costs.gather.alpha_s);
  std::vector<std::vector<Block>> out;
  for (size_t i = 0, batch = 0; i < jobs.size(); ++i) {
    const bool first =
        batch < batching.begins.size() && static_cast<int>(i) == batching.begins[batch];
    if (first) ++batch;
    if (first || jobs[i].dtype != jobs[i - 1].dtype) out.emplace_back();
    out.back().push_back(jobs[i].block);
  }
  return out;
}

void append(std::vector<Op>& ops, Collective kind, const std::vector<std::vector<Block>>& all,
            int in_flight, const OneShot& one_shot, const Plan& line) {
  int64_t launched_bytes = 0;
  std::vector<int64_t> ends;  // of those that do not go in one shot, in bytes launched
  const auto count = [&](const Op& op) {
    const int64_t bytes = line.bytes(op);
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

Plan build(const Draft& draft, const Plan& line, const DraftCosts& costs) {
  std::vector<Op> ops;
  if (draft.split) {
    append(ops, Collective::reduce_scatter, draft.ops, draft.in_flight, costs.one_shot, line);
    append(ops, Collective::all_gather, gathers(draft, line, costs), draft.in_flight,
           costs.one_shot, line);
  } else {
    append(ops, Collective::all_reduce, draft.ops, draft.in_flight, costs.one_shot, line);
  }
  return line.with_ops("auto", std::move(ops));
}

void add(std::vector<Block>& blocks, Block block, const Plan& line) {
  auto after = std::upper_bound(blocks.begin(), blocks.end(), block);
  const DType dtype = line.dtype(block);
  if (after != blocks.begin()) {
    auto before = after - 1;
    if (before->end == block.begin && line.dtype(*before) == dtype) {
      block.begin = before->begin;
      after = blocks.erase(before);
    }
  }
  if (after != blocks.end() && block.end == after->begin && line.dtype(*after) == dtype) {
    after->begin = block.begin;
  } else {
    blocks.insert(after, block);
  }
}

}  // namespace usbyte
