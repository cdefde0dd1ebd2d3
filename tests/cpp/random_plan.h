// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "usbyte/plan.h"

namespace usbyte {

/// How many random cases a property test of policies tries: fewer where sanitizers make them slow.
constexpr int cases(int count) {
#ifdef USBYTE_SANITIZED
  return std::max(count / 10, 1);
#else
  return count;
#endif
}

inline int64_t uniform(std::mt19937& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

/// Tensors of random sizes; dtypes change now and then if `mixed`.
inline std::vector<TensorSpec> random_tensors(std::mt19937& rng, bool mixed = true) {
  constexpr DType kTypes[] = {DType::float32, DType::float64, DType::int32, DType::int64};
  std::vector<TensorSpec> tensors;
  int64_t offset = 0;
  DType dtype = DType::float32;
  const int64_t count = uniform(rng, 1, 12);
  for (int64_t i = 0; i < count; ++i) {
    if (mixed && uniform(rng, 0, 3) == 0) dtype = kTypes[uniform(rng, 0, 3)];
    tensors.push_back({"t" + std::to_string(i), uniform(rng, 1, 40), dtype, offset});
    offset = tensors.back().end();
  }
  return tensors;
}

/// A valid plan for `tensors`: random cuts inside and across tensors, random grouping of blocks
/// into ops, all_reduce or reduce_scatter + all_gather, random windows, fences and order.
inline Plan random_plan(std::mt19937& rng, const std::vector<TensorSpec>& tensors) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < tensors.size();) {
    size_t j = i;
    while (j < tensors.size() && tensors[j].dtype == tensors[i].dtype) ++j;
    for (int64_t at = tensors[i].offset; at < tensors[j - 1].end();) {
      const int64_t end = std::min(at + uniform(rng, 1, 50), tensors[j - 1].end());
      blocks.push_back({at, end});
      at = end;
    }
    i = j;
  }
  std::shuffle(blocks.begin(), blocks.end(), rng);
  const auto dtype_at = [&](Block b) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const TensorSpec& t) { return b.begin < t.end(); })
        ->dtype;
  };
  std::vector<Op> ops;
  const auto admission = [&](Op& op) {
    op.window_bytes = uniform(rng, 1, 600);
    op.fence = uniform(rng, 0, 4) == 0;
  };
  for (size_t i = 0; i < blocks.size();) {
    Op op{uniform(rng, 0, 1) ? Collective::all_reduce : Collective::reduce_scatter, {}, 1, false};
    for (int64_t k = uniform(rng, 1, 3); k > 0 && i < blocks.size(); --k) {
      if (!op.blocks.empty() && dtype_at(blocks[i]) != dtype_at(op.blocks.front())) break;
      op.blocks.push_back(blocks[i++]);
    }
    admission(op);
    ops.push_back(op);
  }
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].kind != Collective::reduce_scatter) continue;
    Op gather{Collective::all_gather, ops[i].blocks, 1, false};
    admission(gather);
    const auto at = uniform(rng, static_cast<int64_t>(i) + 1, static_cast<int64_t>(ops.size()));
    ops.insert(ops.begin() + at, gather);
  }
  return Plan("random", tensors, std::move(ops));
}

inline Plan random_plan(std::mt19937& rng, bool mixed = true) {
  return random_plan(rng, random_tensors(rng, mixed));
}

}  // namespace usbyte
