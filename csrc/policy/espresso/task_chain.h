// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "cluster.h"
#include "strategy.h"
#include "usbyte/codec.h"

namespace usbyte {

/// What tasks wait for. A flat collective goes over the link between nodes.
enum class Resource : uint8_t { compute, cpu, intra, inter };
constexpr size_t kResources = 4;
constexpr size_t kMostStages = 12;  // C A2A D | C A2A D C AG D | C AG D

/// The tasks of one tensor with one strategy.
struct TaskChain {
  int strategy = -1;  ///< of the list it was made from
  int count = 0;
  std::array<uint8_t, kMostStages> resource;
  std::array<double, kMostStages> seconds;
  /// What the tasks after this one take at least.
  std::array<double, kMostStages> after_s;

  double alone_s() const { return count > 0 ? seconds[0] + after_s[0] : 0; }
  /// Seconds on each resource.
  std::array<double, kResources> load() const;
};

/// Makes the chains of one tensor, or of all that have its size, type and codec.
class TaskChainBuilder {
 public:
  /// Both outlive it. Throws UsageError if the cost of the tensor's codec is not known.
  TaskChainBuilder(const CompressionCluster& cluster, const CompressionJob::Tensor& tensor);

  /// Nothing if this cluster, the codec or the type does not admit the strategy.
  std::optional<TaskChain> make(const Strategy& strategy) const;

 private:
  const CompressionCluster* cluster_;
  const CompressionJob::Tensor* tensor_;
  std::shared_ptr<const Codec> codec_;
  std::array<std::optional<CodecCost>, 2> cost_;  // by processor
};

}  // namespace usbyte
