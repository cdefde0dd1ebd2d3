#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/codec_costs.h"
#include "usbyte/network.h"
#include "usbyte/profile.h"

/// ByteComp: how each gradient is compressed, if at all, so that the iteration is shortest. Wang,
/// Lin, Zhu and Ng, "Hi-Speed DNN Training with Espresso: Unleashing the Full Potential of Gradient
/// Compression with Near-Optimal Usage Strategies", EuroSys 2023.
namespace usbyte {

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

/// The decision tree, each strategy once, uncompressed ones first. Flat: AR | RS AG | C AR D (for
/// codecs that add) | C AG D | C A2A D (C) AG (D) | C G D (C) B (D). Hierarchical: first RS or
/// C A2A D, with second AG or C AG D; or first R or C G D, with second B or C B D; and between
/// nodes any of the flat ones. Each C and D on each of the cluster's processors.
std::vector<Strategy> decision_tree(const CompressionCluster& cluster);

/// F(S): seconds of an iteration in which each tensor takes its strategy. The compute stream, the
/// CPU threads and the two links each serve one task after the other, in order of arrival and, at
/// one time, of backward. A codec on the GPU delays what backward does next. Decoding n messages
/// takes n times as long as one; encoding for an all_to_all counts as one message, as in the paper,
/// where the engine encodes each shard. Throws UsageError on a strategy that the cluster or the
/// tensor's codec does not admit.
double iteration_s(const CompressionJob& job, const CompressionCluster& cluster,
                   std::span<const Strategy> strategies);

/// When each collective of each tensor would be started, by the same timeline.
struct ScheduledStage {
  int tensor;  ///< of the job
  int stage;   ///< of its strategy
  double start_s;
};
/// All collectives by start; equal ones in order of backward.
std::vector<ScheduledStage> schedule(const CompressionJob& job, const CompressionCluster& cluster,
                                     std::span<const Strategy> strategies);

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
