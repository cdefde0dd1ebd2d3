// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cluster.h"
#include "strategy.h"
#include "task_chain.h"

namespace usbyte {

/// What one tensor may choose from: no chain takes at least as much of every resource as another.
struct Options {
  std::vector<TaskChain> all;
  std::vector<int> on_one;  ///< those of `all` whose codecs are on the first processor there is
  int uncompressed = 0;     ///< the fastest of them, if there is one, else of all
  /// By index of `all`: the same with all codecs on the CPU, or -1.
  std::vector<int> on_cpu;
};

/// By size, type and codec, as tensors that have these in common have the same.
class StrategyTable {
 public:
  StrategyTable(const CompressionJob& job, const CompressionCluster& cluster,
                std::span<const Strategy> allowed);

  const Options& of(int tensor) const { return *by_tensor_[static_cast<size_t>(tensor)]; }

 private:
  using Key = std::tuple<int64_t, DType, std::string>;
  std::map<Key, Options> options_;
  std::vector<const Options*> by_tensor_;
};

}  // namespace usbyte
