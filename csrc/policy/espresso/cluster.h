// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strategy.h"
#include "usbyte/codec_costs.h"
#include "usbyte/network.h"
#include "usbyte/profile.h"

namespace usbyte {

/// What the collectives of `ranks` ranks cost over one link. Bytes are what a rank has before or
/// after, whichever is more: an all_gather or gather of n messages of m bytes is n m bytes.
struct LinkCosts {
  int ranks = 1;
  AlphaBeta all_reduce, reduce_scatter, all_gather, all_to_all, reduce, broadcast, gather;

  /// Of a collective.
  const AlphaBeta& of(StageKind kind) const;
  /// With n ranks, `latency_s` a for a message and b = 1 / `bytes_per_s`: all_reduce
  /// 2(n-1) a + 2(n-1)/n m b; reduce_scatter, all_gather, all_to_all half of it; gather
  /// ceil(log2 n) a + (n-1)/n m b; reduce and broadcast ceil(log2 n) (a + m b). Thakur,
  /// Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
  static LinkCosts thakur(int ranks, double latency_s, double bytes_per_s);
  /// all_reduce, reduce_scatter and all_gather as `network` has them for an op alone; the others
  /// from its reduce_scatter, by the formulas above.
  static LinkCosts of(const NetworkModel& network);
};

/// Ranks, links and codecs. With one node, or one rank in each, there is one link (`flat`, which is
/// served as `inter`) and all strategies are flat.
struct CompressionCluster {
  int nodes = 1, ranks_per_node = 1;
  LinkCosts flat;   ///< all ranks, over the links between nodes
  LinkCosts intra;  ///< the ranks of a node
  /// One rank of each node, with the link of the node to itself; ranks of a node that use it at
  /// the same time share it.
  LinkCosts inter;
  /// Of one rank, by codec; nothing where codecs cannot run there. CPU: of the threads that a rank
  /// has for it, together.
  std::optional<CodecCosts> gpu, cpu;

  bool two_levels() const { return nodes > 1 && ranks_per_node > 1; }
  int ranks() const { return nodes * ranks_per_node; }

  /// One level, as on the path that training uses.
  static CompressionCluster of(const NetworkModel& network, std::optional<CodecCosts> gpu,
                               std::optional<CodecCosts> cpu);
  /// Costs by `LinkCosts::thakur`. The link of a node is shared by its ranks; in a flat
  /// all_to_all each of them sends over it what goes to other nodes.
  static CompressionCluster thakur(int nodes, int ranks_per_node, double intra_latency_s,
                                   double intra_bytes_per_s, double inter_latency_s,
                                   double inter_bytes_per_s, std::optional<CodecCosts> gpu,
                                   std::optional<CodecCosts> cpu);
};

/// Gradients of one iteration, in the order in which backward produces them.
struct CompressionJob {
  struct Tensor {
    int64_t numel;
    DType dtype = DType::float32;
    double ready_s = 0;  ///< since the forward pass began; ascending
    /// What the iteration still takes once the sum has arrived, s; negative where it is not needed
    /// at its end.
    double rest_s = 0;
    /// What it may be compressed by. Codecs of two rounds are never used.
    std::string codec = "none";
  };
  std::vector<Tensor> tensors;
  double rest_s = 0;  ///< what the iteration still takes once backward has ended, s

  /// Of a profile. `codec_of` is by tensor of the profile, or empty: nothing may be compressed.
  /// Throws UsageError on other sizes.
  static CompressionJob of(const Profile& profile, Overlap overlap,
                           std::span<const std::string> codec_of);
};

}  // namespace usbyte
