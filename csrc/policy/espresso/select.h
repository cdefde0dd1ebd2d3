// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cluster.h"
#include "strategy.h"

namespace usbyte {

/// What `select_strategies` found.
struct StrategySelection {
  std::vector<Strategy> strategies;  ///< by tensor of the job
  double iteration_s = 0;
  double uncompressed_s = 0;  ///< each tensor with its fastest uncompressed strategy
  double greedy_s = 0;        ///< after algorithm 1 alone
  double offloaded_s = 0;     ///< after algorithms 1 and 2
  int64_t simulated = 0;      ///< tasks
};

/// Tasks that the descent of `select_strategies` simulates: about 0.1 s of one core.
constexpr int64_t kStrategyWork = 3'000'000;

/// A strategy for each tensor, of those in `allowed` (empty: the decision tree). Deterministic.
///
/// 1. Algorithm 1 of the paper, codecs on one processor (the GPU, if there is one): tensors by size
///    descending, of one size the last one in backward first; each takes the option with the least
///    F. Uncompressed tensors that have arrived before everything idles are left alone, since
///    shortening them moves nothing.
/// 2. Algorithm 2: of n tensors that have size and option in common the u earliest in backward
///    move their codecs to the CPU; all combinations of u are tried. Where these are more than
///    some thousand, the groups take turns, each with its best u, until nothing changes.
/// 3. Not in the paper, whose two algorithms alone miss the optimum of small jobs by up to 80 %:
///    coordinate descent. Each tensor in turn takes the best of all its options, also with codecs
///    on both processors, until nothing changes, then pairs of neighbours in backward do. It begins
///    with what 1 and 2 found, with one option for all tensors, and with choices that load all
///    resources about equally; the most promising first.
///
/// Where a tensor has many options, those that take no less of any resource than another are not
/// tried, though one in more parts may let others in between: some small jobs come out better with
/// a few options alone.
///
/// The descent ends when `work` tasks have been simulated, of more than 320 tensors n^2 / 320^2
/// times as many, but no more than ten times; 1 and 2 end by themselves, or after ten times `work`.
/// What comes out is the best that was seen, choices to begin with included.
StrategySelection select_strategies(const CompressionJob& job, const CompressionCluster& cluster,
                                    std::span<const Strategy> allowed = {},
                                    int64_t work = kStrategyWork);

}  // namespace usbyte
