// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/topology.h"

namespace usbyte {

/// Throws UsageError, which names the op, unless the mesh has the dimensions of all ops that have
/// one, and sums reach all ranks together with the scatters before them.
void check_dimensions(const Plan& plan, const Topology& mesh);

/// Whether it adds up what a scatter along another dimension has left.
inline bool of_shards(const Op& op) {
  return op.kind == Collective::all_reduce && op.dimension >= 0;
}

/// The dimension that `op`, which has one, is in; throws UsageError if there is none.
const Dimension& dimension_of(const Op& op, const Topology& mesh);

/// Blocks that `op` works on, on `rank`: its own ones, or of an all_reduce in a dimension this
/// rank's shards of them, of those that are not empty. `mesh` may be null for ops without a
/// dimension; throws UsageError as `scatter_and_sum`.
std::vector<Block> worked_on(const Op& op, const Topology* mesh, int rank);

/// The same with startups of so many messages one after the other: each block is one, of
/// reduce_scatters and all_gathers.
Topology with_startups(const Topology& mesh, size_t messages);

/// What an op with a dimension costs: its startup, and how long its bytes, or those of its codec's
/// messages, have the dimension to themselves, s. Rank 0's shards are the largest. Ranks send to
/// each other directly.
struct DimensionCost {
  double startup_s = 0, transfer_s = 0;
};
DimensionCost dimension_cost(const Plan& plan, const Op& op, const Topology& mesh);

/// How an all_reduce goes along two dimensions: gradients are scattered in one, what
/// is left is added up in the other one, `sum_dimension`, and sums are gathered in the first; each
/// with a codec of its own.
struct DimensionPath {
  int sum_dimension = 0;
  std::string scatter = "none", sum = "none", gather = "none";

  bool operator==(const DimensionPath&) const = default;
};

/// Whether an op can: an all_reduce among all ranks with a codec, unless that needs whole matrices.
bool has_dimension_paths(const Op& op);

/// The two dimensions of more than one rank, if there are no others: those that shards are not
/// added up in, and are. Throws UsageError unless `sum_dimension` is one of two.
std::pair<int, int> scatter_and_sum(const Topology& mesh, int sum_dimension);

/// The same plan where ops follow the paths that they have, in three steps, each beside those of
/// the ops before and after it; one with a scheme, without. `paths` is by op; others stay as they
/// are. Throws UsageError as `scatter_and_sum`, and for an op without `has_dimension_paths`.
Plan along_dimensions(const Plan& plan, const Topology& mesh,
                      std::span<const std::optional<DimensionPath>> paths);

}  // namespace usbyte
