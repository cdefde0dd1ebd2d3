#pragma once

#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/topology.h"

namespace usbyte {

/// The op of the plan that has scattered what `op` works on; null if none has.
const Op* scattered_by(const Plan& plan, const Op& op);

/// Blocks that `op` works on, on `rank`: its own ones, or of an all_reduce with a line this rank's
/// shards of them, of those that are not empty. `mesh` may be null for plans without lines.
std::vector<Block> worked_on(const Plan& plan, const Op& op, const Topology* mesh, int rank);

/// The same with startups of so many messages one after the other: each block is one, of
/// reduce_scatters and all_gathers.
Topology with_startups(const Topology& mesh, size_t messages);

/// What an op with a line costs: its startup, and how long its bytes have the dimension to
/// themselves, s; of an all_reduce with a codec, its messages. Rank 0's shards are the largest.
struct LineCost {
  double startup_s = 0, transfer_s = 0;
};
LineCost line_cost(const Plan& plan, const Op& op, const Topology& mesh);

/// The same plan where each all_reduce with a codec goes along lines, in three ops: gradients are
/// scattered in the other dimension, what is left is coded and added up in the dimension `coded`,
/// and sums are gathered in the other one; each step beside those of the ops before and after it.
/// Codecs that need whole matrices stay as they are, and so do schemes. Throws UsageError unless
/// there are two dimensions of more than one rank, of which `coded` is one.
Plan along_lines(const Plan& plan, const Topology& mesh, int coded);

}  // namespace usbyte
