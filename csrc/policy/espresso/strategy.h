// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// ByteComp: how each gradient is compressed, if at all, so that the iteration is shortest. Wang,
/// Lin, Zhu and Ng, "Hi-Speed DNN Training with Espresso: Unleashing the Full Potential of Gradient
/// Compression with Near-Optimal Usage Strategies", EuroSys 2023.
namespace usbyte {

struct CompressionCluster;

/// Where a codec runs: between the kernels of backward, or beside them.
enum class Processor : uint8_t { gpu, cpu };

/// Which ranks a step of a strategy joins: all, those of a node, or one (or as many as hold a part)
/// of each node.
enum class Level : uint8_t { flat, intra, inter };

enum class StageKind : uint8_t {
  encode,
  decode,
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  reduce,
  broadcast,
  gather
};

/// One step on a gradient's way: a codec or a collective.
struct Stage {
  StageKind kind;
  Level level = Level::flat;
  Processor processor = Processor::gpu;  ///< of a codec

  auto operator<=>(const Stage&) const = default;
};

/// How one gradient becomes the sum over all ranks.
struct Strategy {
  std::vector<Stage> stages;

  bool compresses() const;
  /// The same with all codecs on `processor`.
  Strategy on(Processor processor) const;
  /// "C[gpu] AG D[cpu]" (C encodes, D decodes; AR, RS, AG, A2A, R, B, G: all_reduce,
  /// reduce_scatter, all_gather, all_to_all, reduce, broadcast, gather); of a hierarchical one
  /// what is done in the node, between nodes, in the node: "RS | AR | AG".
  std::string describe() const;
  /// Inverse of `describe`; throws UsageError on what is none.
  static Strategy parse(std::string_view text);

  auto operator<=>(const Strategy&) const = default;
};

/// The decision tree, each strategy once, uncompressed ones first. Flat: AR | RS AG | C AR D (for
/// codecs that add) | C AG D | C A2A D (C) AG (D) | C G D (C) B (D). Hierarchical: first RS or
/// C A2A D, with second AG or C AG D; or first R or C G D, with second B or C B D; and between
/// nodes any of the flat ones. Each C and D on each of the cluster's processors.
std::vector<Strategy> decision_tree(const CompressionCluster& cluster);

}  // namespace usbyte
