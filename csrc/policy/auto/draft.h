// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// An all_reduce; or, if split, a reduce_scatter and an all_gather of the same blocks.
struct DraftOp {
  std::vector<Block> blocks;  ///< of one dtype, ascending and apart
  bool split = false;
};

/// What a search changes: the ops in launch order, and what applies to all of them.
struct Draft {
  std::vector<DraftOp> ops;
  int in_flight = 1;                  ///< ops at a time
  bool gathers_as_scattered = false;  ///< one all_gather for each reduce_scatter
};

/// What shapes a plan beyond its draft: the costs of the network, and when each tensor is due, s.
struct DraftCosts {
  DraftCosts(const NetworkModel& network, const std::vector<double>& due)
      : gather(network.cost(Collective::all_gather, 1)), one_shot(network.one_shot), due_s(&due) {}

  AlphaBeta gather;
  OneShot one_shot;
  const std::vector<double>* due_s;
};

/// The plan that a draft means, for the tensors of `layout`. With k in flight, the window of each
/// op is the bytes of the k - 1 ops before it and its own; those that go in one shot are not
/// counted among the k, and there is room for them besides. The gathers begin after the last
/// scatter, by due date, in the batches that `batch_exactly` finds for one at a time, or those of
/// the scatters. Before an all_reduce that comes after the last scatter, the gathers are launched
/// that are due no later.
Plan build(const Draft& draft, const Plan& layout, const DraftCosts& costs);

/// Adds `block` to `blocks`, which are ascending and apart, joining neighbours of one dtype.
void add(std::vector<Block>& blocks, Block block, const Plan& layout);

}  // namespace usbyte
