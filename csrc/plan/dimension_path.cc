// SPDX-License-Identifier: Apache-2.0
#include "dimension_path.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {

bool has_dimension_paths(const Op& op) {
  const auto codec = make_codec(op.codec);
  return op.kind == Collective::all_reduce && op.dimension < 0 && codec && !codec->matrices();
}

std::pair<int, int> scatter_and_sum(const Topology& mesh, int sum_dimension) {
  std::vector<int> found;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (mesh.dimensions[static_cast<size_t>(d)].size > 1) found.push_back(d);
  }
  if (found.size() != 2 || (sum_dimension != found[0] && sum_dimension != found[1])) {
    throw UsageError("dimension paths: sums in dimension " + std::to_string(sum_dimension) +
                     " need two dimensions of more than one rank, of which it is one; there are " +
                     std::to_string(found.size()));
  }
  return {sum_dimension == found[0] ? found[1] : found[0], sum_dimension};
}

const Dimension& dimension_of(const Op& op, const Topology& mesh) {
  if (op.dimension >= 0 && op.dimension < mesh.ndim())
    return mesh.dimensions[static_cast<size_t>(op.dimension)];
  throw UsageError("dimension paths: a plan of other dimensions than the network's");
}

void check_dimensions(const Plan& plan, const Topology& mesh) {
  std::map<Block, int> scattered;  // the dimension
  for (size_t i = 0; i < plan.ops().size(); ++i) {
    const Op& op = plan.ops()[i];
    if (op.dimension < 0) continue;
    const auto what = [&] { return plan.describe(static_cast<int>(i)); };
    if (op.dimension >= mesh.ndim())
      throw UsageError(what() + ": the network has no such dimension");
    for (Block b : op.blocks) {
      if (op.kind == Collective::reduce_scatter) scattered[b] = op.dimension;
      if (!of_shards(op)) continue;
      const Dimension& inside = mesh.dimensions[static_cast<size_t>(scattered.at(b))];
      if (inside.size * dimension_of(op, mesh).size != mesh.ranks() ||
          scatter_and_sum(mesh, op.dimension).first != scattered.at(b)) {
        throw UsageError(what() +
                         ": this dimension and that of the scatter do not reach all ranks");
      }
    }
  }
}

std::vector<Block> worked_on(const Op& op, const Topology* mesh, int rank) {
  if (!of_shards(op)) return op.blocks;
  if (!mesh)
    throw UsageError("dimension paths: a plan of several dimensions, and a network without");
  const auto inside = static_cast<size_t>(scatter_and_sum(*mesh, op.dimension).first);
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

DimensionCost dimension_cost(const Plan& plan, const Op& op, const Topology& mesh) {
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

Plan along_dimensions(const Plan& plan, const Topology& mesh,
                      std::span<const std::optional<DimensionPath>> paths) {
  if (paths.size() != plan.ops().size()) {
    throw UsageError("dimension paths: " + std::to_string(paths.size()) + " paths for " +
                     std::to_string(plan.ops().size()) + " ops");
  }
  std::vector<Op> out,
      gathers;  // each of the latter behind the next sum, or op without a dimension
  for (size_t i = 0; i < paths.size(); ++i) {
    const Op& op = plan.ops()[i];
    if (const std::optional<DimensionPath>& path = paths[i]) {
      if (!has_dimension_paths(op)) {
        throw UsageError("dimension paths: " + plan.describe(static_cast<int>(i)) +
                         " has no shards to code");
      }
      const auto [inside, between] = scatter_and_sum(mesh, path->sum_dimension);
      const auto step = [&](Collective kind, int dimension, const std::string& codec) {
        Op one{kind, op.blocks, op.window_bytes, false, codec};
        one.dimension = dimension;
        return one;
      };
      out.push_back(step(Collective::reduce_scatter, inside, path->scatter));
      out.back().fence = op.fence;
      out.push_back(step(Collective::all_reduce, between, path->sum));
      std::ranges::move(std::exchange(gathers, {}), std::back_inserter(out));
      gathers.push_back(step(Collective::all_gather, inside, path->gather));
    } else {
      out.push_back(op);
      std::ranges::move(std::exchange(gathers, {}), std::back_inserter(out));
    }
  }
  std::ranges::move(gathers, std::back_inserter(out));
  return plan.with_ops(plan.policy(), std::move(out));
}

}  // namespace usbyte
