#pragma once

#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// What a search changes: the blocks of each op in launch order, and what applies to all of them.
struct Draft {
  std::vector<std::vector<Block>> ops;  ///< blocks of one dtype, ascending and apart
  int in_flight = 1;                    ///< ops at a time
  /// False: all_reduces. True: reduce_scatters, and then all_gathers of the same blocks.
  bool split = false;
};

/// How the gathers of a split draft are batched: what one costs, and when each tensor is due.
struct GatherCost {
  AlphaBeta cost;
  const std::vector<double>* due_s;
};

/// The plan that a draft means, for the tensors of `line`. With k > 1 in flight, the window of each
/// op is the bytes of the k - 1 ops before it and its own. The gathers of a split draft come by due
/// date, in the batches that `batch_exactly` finds.
Plan build(const Draft& draft, const Plan& line, const GatherCost& gather);

/// Adds `block` to `blocks`, which are ascending and apart, joining neighbours of one dtype.
void add(std::vector<Block>& blocks, Block block, const Plan& line);

}  // namespace usbyte
