#include "draft.h"

#include <algorithm>
#include <limits>

#include "batching.h"

namespace usbyte {
namespace {

std::vector<std::vector<Block>> gathers(const Draft& draft, const Plan& line,
                                        const DraftCosts& costs) {
  struct Job {
    Block block;
    DType dtype;
    double length_s, due_s;
  };
  std::vector<Job> jobs;
  for (const auto& blocks : draft.ops) {
    for (Block b : blocks) {
      const Op op{Collective::all_gather, {b}};
      double due = std::numeric_limits<double>::infinity();
      for (int t : line.tensors_of(op)) due = std::min(due, (*costs.due_s)[static_cast<size_t>(t)]);
      jobs.push_back({b, line.dtype(b),
                      costs.gather.beta_s_per_byte * static_cast<double>(line.bytes(op)), due});
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
  std::vector<int64_t> bytes;
  for (const Op& op : ops) bytes.push_back(line.bytes(op));
  for (const auto& blocks : all) {
    Op op{kind, blocks, 1};
    op.window_bytes = line.bytes(op);
    bytes.push_back(op.window_bytes);
    int beside = in_flight - (one_shot.takes(kind, bytes.back()) ? 0 : 1);
    for (size_t i = bytes.size() - 1; i-- > 0; op.window_bytes += bytes[i]) {
      if (!one_shot.takes(ops[i].kind, bytes[i]) && beside-- == 0) break;
    }
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
  return line.with("auto", std::move(ops));
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
