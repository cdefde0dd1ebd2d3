// SPDX-License-Identifier: Apache-2.0
#include "lines.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {

bool of_shards(const Op& op) { return op.kind == Collective::all_reduce && op.line >= 0; }

bool has_line_ways(const Op& op) {
  const auto codec = make_codec(op.codec);
  return op.kind == Collective::all_reduce && op.line < 0 && codec && !codec->matrices();
}

std::pair<int, int> scatter_and_sum(const Topology& mesh, int sum_line) {
  std::vector<int> found;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (mesh.dimensions[static_cast<size_t>(d)].size > 1) found.push_back(d);
  }
  if (found.size() != 2 || (sum_line != found[0] && sum_line != found[1])) {
    throw UsageError("lines: sums in dimension " + std::to_string(sum_line) +
                     " need two dimensions of more than one rank, of which it is one; there are " +
                     std::to_string(found.size()));
  }
  return {sum_line == found[0] ? found[1] : found[0], sum_line};
}

const Dimension& dimension_of(const Op& op, const Topology& mesh) {
  if (op.line >= 0 && op.line < mesh.ndim()) return mesh.dimensions[static_cast<size_t>(op.line)];
  throw UsageError("lines: a plan of other dimensions than the network's");
}

void check_lines(const Plan& plan, const Topology& mesh) {
  std::map<Block, int> scattered;  // the line
  for (size_t i = 0; i < plan.ops().size(); ++i) {
    const Op& op = plan.ops()[i];
    if (op.line < 0) continue;
    const auto what = [&] { return plan.describe(static_cast<int>(i)); };
    if (op.line >= mesh.ndim()) throw UsageError(what() + ": the network has no such dimension");
    for (Block b : op.blocks) {
      if (op.kind == Collective::reduce_scatter) scattered[b] = op.line;
      if (!of_shards(op)) continue;
      const Dimension& inside = mesh.dimensions[static_cast<size_t>(scattered.at(b))];
      if (inside.size * dimension_of(op, mesh).size != mesh.ranks() ||
          scatter_and_sum(mesh, op.line).first != scattered.at(b)) {
        throw UsageError(what() + ": this line and that of the scatter do not reach all ranks");
      }
    }
  }
}

std::vector<Block> worked_on(const Op& op, const Topology* mesh, int rank) {
  if (!of_shards(op)) return op.blocks;
  if (!mesh) throw UsageError("lines: a plan of several dimensions, and a network without");
  const auto inside = static_cast<size_t>(scatter_and_sum(*mesh, op.line).first);
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
  const Dimension& dimension = dimension_of(op, mesh);
  const auto codec = make_codec(op.codec);
  const bool sums = op.kind == Collective::all_reduce;
  double bytes = 0;
  for (Block b : worked_on(op, &mesh, 0)) {
    if (!codec) {
      bytes += static_cast<double>(b.numel() * itemsize(plan.dtype(b)));
    } else if (sums) {
      bytes += static_cast<double>(codec->message_bytes(b.numel()));
    } else {
      const int64_t part = shard(b, 0, dimension.size).numel();
      bytes += static_cast<double>(dimension.size * codec->message_bytes(part));
    }
  }
  int phases = 1;
  if (codec && sums && !codec->adds()) {
    bytes *= dimension.size;  // messages of all are gathered
  } else if (sums) {
    phases = 2;
  }
  // What is coded, or of shards, is packed into one.
  const double messages = sums || codec ? phases : static_cast<double>(op.blocks.size());
  return {messages * dimension.startup_s(),
          phases * dimension.moved_bytes(bytes, false) / dimension.bytes_per_s};
}

Plan along_lines(const Plan& plan, const Topology& mesh,
                 std::span<const std::optional<LineWay>> ways) {
  if (ways.size() != plan.ops().size()) {
    throw UsageError("lines: " + std::to_string(ways.size()) + " ways for " +
                     std::to_string(plan.ops().size()) + " ops");
  }
  std::vector<Op> out, gathers;  // each of the latter behind the next sum, or op without lines
  for (size_t i = 0; i < ways.size(); ++i) {
    const Op& op = plan.ops()[i];
    if (const std::optional<LineWay>& way = ways[i]) {
      if (!has_line_ways(op)) {
        throw UsageError("lines: " + plan.describe(static_cast<int>(i)) + " has no shards to code");
      }
      const auto [inside, between] = scatter_and_sum(mesh, way->sum_line);
      const auto step = [&](Collective kind, int line, const std::string& codec) {
        Op one{kind, op.blocks, op.window_bytes, false, codec};
        one.line = line;
        return one;
      };
      out.push_back(step(Collective::reduce_scatter, inside, way->scatter));
      out.back().fence = op.fence;
      out.push_back(step(Collective::all_reduce, between, way->sum));
      std::ranges::move(std::exchange(gathers, {}), std::back_inserter(out));
      gathers.push_back(step(Collective::all_gather, inside, way->gather));
    } else {
      out.push_back(op);
      std::ranges::move(std::exchange(gathers, {}), std::back_inserter(out));
    }
  }
  std::ranges::move(gathers, std::back_inserter(out));
  return plan.with_ops(plan.policy(), std::move(out));
}

}  // namespace usbyte
