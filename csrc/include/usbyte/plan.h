// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "usbyte/tensor.h"
#include "usbyte/topology.h"

namespace usbyte {

struct SparseDensity;
struct SparseShape;

/// Half-open range of flat buffer elements. May begin and end inside a tensor and may span tensors
/// of one dtype.
struct Block {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t numel() const { return end - begin; }
  auto operator<=>(const Block&) const = default;
};

/// Part of `block` that `rank` of `size` owns between a reduce_scatter and its all_gather:
/// consecutive ranges of ceil(numel / size) elements; the last ones may be shorter or empty, so
/// nothing is padded.
Block shard(Block block, int rank, int size);

/// What a sparse_all_reduce adds up, and how.
struct SparseAllReduceSpec {
  int tensor = 0;              ///< index of a sparse one
  std::string scheme = "zen";  ///< of sparse.h
  /// That the busiest rank is expected to send or receive; nothing tells it before.
  int64_t bytes = 0;

  bool operator==(const SparseAllReduceSpec&) const = default;
};

/// One collective on one or more blocks, and its admission: at most `window_bytes` are in flight
/// together with it (an op larger than its window goes alone); with `fence`, every earlier op has
/// completed first.
///
/// With a `codec` (of codec.h) what travels is that one's messages: in an all_reduce one for each
/// block; in a reduce_scatter one for each `shard` of each block, to the rank that adds them up; in
/// an all_gather one for each of the rank's own shards. With a codec of two rounds the
/// reduce_scatter is the first and the all_gather the second, and their blocks are whole tensors.
/// With a `scheme` (of sparse.h) too, an all_reduce adds up what a codec has picked as rows of one
/// element, numbered as the op's blocks follow each other, instead of gathering its messages.
///
/// A sparse_all_reduce has no blocks and no codec, but a sparse tensor.
///
/// An all_reduce with a `route` goes in chunks through the dimensions of the network; one without
/// takes no notice of them. Routes and codecs exclude each other.
///
/// An op with a `dimension` is among the ranks of an axis group: those that differ in the
/// coordinate of that dimension only. A reduce_scatter leaves a rank its `shard` by that
/// coordinate; an all_reduce of the same blocks, with another dimension, adds these shards up; an
/// all_gather with the first one ends it. All three are of the same blocks, and each may have a
/// codec, whose messages go through that dimension alone: that of the scatter
/// remembers what is unsent or nothing, in the same row as that of the sum, and that of the gather
/// remembers nothing.
struct Op {
  Collective kind = Collective::all_reduce;
  std::vector<Block> blocks;
  int64_t window_bytes = 0;
  bool fence = false;
  std::string codec = "none";
  std::optional<SparseAllReduceSpec> sparse = std::nullopt;
  std::string scheme = "";
  std::optional<MeshSchedule> route = std::nullopt;
  int dimension = -1;  ///< -1: among all ranks

  /// The scheme that adds up the op's rows; empty for ops that a communicator executes.
  const std::string& sparse_scheme() const { return sparse ? sparse->scheme : scheme; }
  bool operator==(const Op&) const = default;
};

/// Returns the name by which a policy is shown: "us-byte" for "usbyte", which it was called before,
/// and any other name unchanged. A plan and `make_plan` accept both, so older plan files can be
/// read.
std::string policy_name(std::string_view name);

/// What one iteration communicates, in launch order; byte-identical on every rank.
///
/// The *flat buffer* holds all gradient elements, in the order of `tensors`. Runs of tensors of
/// one dtype are segments; a block never crosses a segment's edge, and each segment starts on a
/// 256-byte boundary of the buffer.
class Plan {
 public:
  Plan();
  /// Throws PlanError unless the plan is valid: tensors contiguous from 0 with unique names, sparse
  /// ones last; ops only of those kinds with positive windows, and codecs and schemes that can do
  /// what their ops ask for, of floats only; every sparse tensor in exactly one sparse_all_reduce;
  /// every element covered exactly once by all_reduce, or exactly once by a reduce_scatter and once
  /// by a later all_gather whose block is the very block that was scattered, and, if these have a
  /// dimension, once by an all_reduce with another one in between.
  Plan(std::string policy, std::vector<TensorSpec> tensors, std::vector<Op> ops);
  /// Another plan for the same tensors, which the two share.
  Plan with_ops(std::string policy, std::vector<Op> ops) const;

  const std::string& policy() const { return policy_; }
  const std::vector<TensorSpec>& tensors() const { return layout_->tensors; }
  const std::vector<Op>& ops() const { return ops_; }

  /// Elements of the flat buffer.
  int64_t numel() const { return tensors().empty() ? 0 : tensors().back().end(); }
  /// Bytes of the flat buffer, padding between segments included.
  int64_t flat_buffer_bytes() const;
  /// Byte position of `element` there.
  int64_t byte_offset(int64_t element) const;
  /// Element type at `block`.
  DType dtype(Block block) const;
  /// Element type of what `op` works on.
  DType dtype(const Op& op) const;
  /// Bytes of `op`'s gradients; of sparse ones, as they are expected.
  int64_t bytes(const Op& op) const;
  /// Bytes that one rank sends for `op`: `bytes(op)`, or the size of its encoded messages if it has
  /// a codec. `window_bytes` limits these.
  int64_t message_bytes(const Op& op) const;
  /// What it is for the network, and its payload there: messages that cannot be added are gathered,
  /// and sums of two rounds reduced; an all_gather that takes as long as a scheme, by its formula.
  std::pair<Collective, int64_t> traffic(const Op& op, int ranks) const;
  /// Of the rows that `op` adds up by a scheme.
  SparseShape shape(const Op& op) const;
  /// How dense those are that a codec picks, if ranks pick independently of each other.
  SparseDensity density(const Op& op, int ranks) const;
  /// Indices of the tensors that `op` touches, ascending.
  std::vector<int> tensors_of(const Op& op) const;
  /// The same, behind what `out` holds.
  void append_tensors_of(const Op& op, std::vector<int>& out) const;
  /// The tensor that the block is the whole of; null if there is none.
  const TensorSpec* tensor_at(Block block) const;
  /// "op 3 (all_reduce, 8.0 MB: conv1.weight, conv1.bias and 2 more)", for messages.
  std::string describe(int op) const;

  /// Canonical JSON: same plan, same text.
  std::string to_json() const;
  /// Throws PlanError on malformed JSON or an invalid plan.
  static Plan from_json(std::string_view json);
  /// FNV-1a over the canonical JSON; equal on every platform.
  uint64_t hash() const;

  bool operator==(const Plan& other) const {
    return policy_ == other.policy_ && ops_ == other.ops_ &&
           (layout_ == other.layout_ || tensors() == other.tensors());
  }

 private:
  struct DTypeSegment {
    int64_t begin, end, byte_begin;
    DType dtype;
  };
  struct Layout {
    std::vector<TensorSpec> tensors;
    std::vector<DTypeSegment> segments;
  };

  static Layout lay_out(std::vector<TensorSpec> tensors);
  const DTypeSegment& segment(int64_t element) const;
  void validate() const;
  void check_sparse() const;

  std::string policy_;
  std::shared_ptr<const Layout> layout_;
  std::vector<Op> ops_;
};

/// A copy of `plan` in which every op without a codec is split by codec: one op for each distinct
/// entry of `codec_of`, which is by tensor, in the position of the original op. Ops with a codec
/// are unchanged. If the codec cannot be relayed, a reduce_scatter becomes an all_reduce, and its
/// all_gather leaves these blocks out. If the codec has two rounds, a matrix for which it pays is
/// scattered as a whole in the position of its last part, and gathered there or after the next op.
/// With `sharded`, all_gathers carry parameters and get no codec; throws UsageError for codecs that
/// cannot do without.
Plan with_codecs(const Plan& plan, std::span<const std::string> codec_of, bool sharded = false);

}  // namespace usbyte
