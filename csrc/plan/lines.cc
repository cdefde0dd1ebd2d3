#include "usbyte/lines.h"

#include <algorithm>
#include <string>
#include <utility>

#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

bool of_shards(const Op& op) { return op.kind == Collective::all_reduce && op.line >= 0; }

// The other one of two dimensions of more than one rank.
int other_than(int coded, const Topology& mesh) {
  std::vector<int> found;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (mesh.dimensions[static_cast<size_t>(d)].size > 1) found.push_back(d);
  }
  if (found.size() != 2 || (coded != found[0] && coded != found[1])) {
    throw UsageError("lines: compression in dimension " + std::to_string(coded) +
                     " needs two dimensions of more than one rank, of which it is one; there are " +
                     std::to_string(found.size()));
  }
  return coded == found[0] ? found[1] : found[0];
}

bool can_go_along_lines(const Op& op) {
  const auto codec = make_codec(op.codec);
  return op.kind == Collective::all_reduce && op.line < 0 && codec && !codec->matrices() &&
         op.scheme.empty();
}

}  // namespace

const Op* scattered_by(const Plan& plan, const Op& op) {
  if (!of_shards(op)) return nullptr;
  for (const Op& other : plan.ops()) {
    if (other.kind != Collective::reduce_scatter) continue;
    if (std::ranges::find(other.blocks, op.blocks.front()) != other.blocks.end()) return &other;
  }
  return nullptr;
}

std::vector<Block> worked_on(const Plan& plan, const Op& op, const Topology* mesh, int rank) {
  const Op* const scatter = scattered_by(plan, op);
  if (!scatter) return op.blocks;
  const auto inside = static_cast<size_t>(scatter->line);
  if (!mesh || scatter->line >= mesh->ndim()) {
    throw UsageError("lines: a plan of other dimensions than the network's");
  }
  const int place = mesh->coordinates(rank)[inside], size = mesh->dimensions[inside].size;
  std::vector<Block> out;
  for (Block b : op.blocks) {
    const Block own = shard(b, place, size);
    if (own.numel() > 0) out.push_back(own);
  }
  return out;
}

Topology with_startups(const Topology& mesh, size_t messages) {
  Topology out = mesh;
  for (Dimension& d : out.dimensions) d.latency_s *= static_cast<double>(messages);
  return out;
}

LineCost line_cost(const Plan& plan, const Op& op, const Topology& mesh) {
  if (op.line < 0 || op.line >= mesh.ndim()) {
    throw UsageError("lines: a plan of other dimensions than the network's");
  }
  const Dimension& dimension = mesh.dimensions[static_cast<size_t>(op.line)];
  const auto codec = make_codec(op.codec);
  double bytes = 0;
  for (Block b : worked_on(plan, op, &mesh, 0)) {
    bytes += static_cast<double>(codec ? codec->message_bytes(b.numel())
                                       : b.numel() * itemsize(plan.dtype(b)));
  }
  int phases = 1;
  if (codec && !codec->adds()) {
    bytes *= dimension.size;  // messages of all are gathered
  } else if (op.kind == Collective::all_reduce) {
    phases = 2;
  }
  const double messages = op.kind == Collective::all_reduce ? phases  // packed into one
                                                            : static_cast<double>(op.blocks.size());
  return {messages * dimension.startup_s(),
          phases * dimension.moved_bytes(bytes, false) / dimension.bytes_per_s};
}

Plan along_lines(const Plan& plan, const Topology& mesh, int coded) {
  const int inside = other_than(coded, mesh);
  std::vector<Op> out, gathers;  // each of the latter behind the next sum
  const auto flush = [&out](std::vector<Op>& waiting) {
    std::ranges::move(waiting, std::back_inserter(out));
    waiting.clear();
  };
  for (const Op& op : plan.ops()) {
    if (!can_go_along_lines(op)) {
      out.push_back(op);
      continue;
    }
    Op scatter = op, sum = op, gather = op;
    scatter.kind = Collective::reduce_scatter;
    gather.kind = Collective::all_gather;
    scatter.codec = gather.codec = "none";
    scatter.line = gather.line = inside;
    sum.line = coded;
    sum.fence = gather.fence = false;
    out.push_back(std::move(scatter));
    out.push_back(std::move(sum));
    flush(gathers);
    gathers.push_back(std::move(gather));
  }
  flush(gathers);
  return plan.with(plan.policy(), std::move(out));
}

}  // namespace usbyte
