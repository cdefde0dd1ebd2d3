#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "bytecomp.h"
#include "usbyte/codec.h"

namespace usbyte {

/// What tasks wait for. A flat collective goes over the link between nodes.
enum class Resource : uint8_t { compute, cpu, intra, inter };
constexpr size_t kResources = 4;
constexpr size_t kMostStages = 12;  // C A2A D | C A2A D C AG D | C AG D

/// The tasks of one tensor with one strategy.
struct Chain {
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
class ChainMaker {
 public:
  /// Both outlive it. Throws UsageError if the cost of the tensor's codec is not known.
  ChainMaker(const CompressionCluster& cluster, const CompressionJob::Tensor& tensor);

  /// Nothing if this cluster, the codec or the type does not admit the strategy.
  std::optional<Chain> make(const Strategy& strategy) const;

 private:
  const CompressionCluster* cluster_;
  const CompressionJob::Tensor* tensor_;
  std::shared_ptr<const Codec> codec_;
  std::array<std::optional<CodecCost>, 2> cost_;  // by processor
};

/// What one tensor may choose from: no chain takes at least as much of every resource as another.
struct Options {
  std::vector<Chain> all;
  std::vector<int> on_one;  ///< those of `all` whose codecs are on the first processor there is
  int uncompressed = 0;     ///< the fastest of them, if there is one, else of all
  /// By index of `all`: the same with all codecs on the CPU, or -1.
  std::vector<int> on_cpu;
};

/// By size, type and codec, as tensors that have these in common have the same.
class OptionTable {
 public:
  OptionTable(const CompressionJob& job, const CompressionCluster& cluster,
              std::span<const Strategy> allowed);

  const Options& of(int tensor) const { return *by_tensor_[static_cast<size_t>(tensor)]; }

 private:
  using Key = std::tuple<int64_t, DType, std::string>;
  std::map<Key, Options> options_;
  std::vector<const Options*> by_tensor_;
};

}  // namespace usbyte
