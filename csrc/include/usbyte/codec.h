// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/tensor.h"

namespace usbyte {

/// What random choices are made from: every rank has the same `shared` for an op of a step, and
/// another `own`.
struct RngKey {
  uint64_t shared = 0;
  uint64_t own = 0;

  /// Of the block that begins at element `begin`.
  static RngKey of(uint64_t seed, int64_t step, int64_t begin, int rank);
};

/// What a codec remembers of a run of elements from one step to the next.
struct CodecState {
  /// As many as its `state_rows`: a float32 for each element, 0 at first. They belong to the
  /// parameters and outlive plans.
  std::array<float*, 2> rows{};
  /// Of the run under this plan; 0 at first.
  uint64_t note = 0;
};

class Matrices;
class Selection;

/// How a codec works by groups of elements, so that kernels can do it; results are the
/// same bit for bit, but for the order in which a group is added up.
struct GroupCodec {
  enum class Kind {
    fp16,
    bf16,
    int8,
    e4m3,
    e5m2,
    qsgd2,
    qsgd4,
    qsgd8,
    terngrad,
    majority,
    efsignsgd,
    onebit
  };

  Kind kind;
  /// The state is a running mean of the gradients with this momentum, which is what is encoded;
  /// otherwise it is what has not been sent. Negative if it is not a mean.
  double momentum = -1;
};

/// Makes a run of float32 smaller for the network, with some loss. Immutable, thread-safe,
/// deterministic for a given RngKey.
///
/// Messages are whole numbers of 4 bytes or, where they `add`, of elements of `message_dtype`, so
/// that one can follow another. What is not a number, or infinite, is never lost silently: each
/// codec says what becomes of it.
class Codec {
 public:
  virtual ~Codec() = default;

  /// Name and parameters, as `make_codec` reads them: "topk:0.01".
  virtual std::string spec() const = 0;
  /// Messages of several ranks can be added element by element, as numbers of `message_dtype`, and
  /// decode to the sum then: they travel by all_reduce, others by all_gather.
  virtual bool adds() const { return false; }
  virtual DType message_dtype() const { return DType::uint8; }
  /// Bytes of the message of `count` elements, whatever they are.
  virtual int64_t message_bytes(int64_t count) const = 0;
  /// Rows of its state. One is error feedback, unless a codec says otherwise: training needs what
  /// is lost to be added to the next gradient.
  virtual int state_rows() const { return 1; }
  /// What the rows are, one after the other: "unsent", "unsent, velocity"; empty without any. A
  /// codec can go on with the rows of another as far as they are the same.
  virtual std::string remembers() const;
  /// What `decode` gives is near what was encoded, so that it may be encoded again by ranks that
  /// have added up a part of the elements: it can be scattered and gathered.
  virtual bool relays() const { return true; }
  /// The spec to use in a step (from 0 on), for codecs that begin with less loss than they go on
  /// with. The same codec otherwise.
  virtual std::string at_step(int64_t /*step*/) const { return spec(); }
  /// What kernels do for this codec on a device; nothing where there are none.
  virtual std::optional<GroupCodec> kernels() const { return std::nullopt; }
  /// For codecs that make less of whole matrices, in two rounds; null for others. Without them such
  /// a codec is to send values as they are.
  virtual const Matrices* matrices() const { return nullptr; }
  /// For codecs that send some elements and where they were; null for others.
  virtual const Selection* selection() const { return nullptr; }

  virtual void encode(std::span<const float> values, const RngKey& rng,
                      std::byte* message) const = 0;
  /// values = what the message says.
  virtual void decode(const std::byte* message, const RngKey& rng,
                      std::span<float> values) const = 0;
  /// values += factor * what the message says.
  virtual void decode_add(const std::byte* message, const RngKey& rng, float factor,
                          std::span<float> values) const = 0;
  /// values = what the messages of all ranks, in order of ranks, mean together: their sum, unless a
  /// codec says otherwise. At least one message.
  virtual void combine(std::span<const std::byte* const> messages, const RngKey& rng,
                       std::span<float> values) const;
  /// Encodes a step's gradient together with what `state` holds, and keeps there what training
  /// needs later. Error feedback, unless a codec says otherwise: of r += g what the message says is
  /// taken away. What is not finite shows in this message and is not kept, so that one overflow is
  /// seen in one step.
  virtual void send(std::span<const float> gradient, CodecState& state, const RngKey& rng,
                    int ranks, std::byte* message) const;
};

/// How a codec of two rounds makes less of a matrix of `rows` x `cols`, row by row. In the first
/// round all ranks add up rows x rank numbers, in the second cols x rank. State of two rows: what
/// has not been sent, and from its beginning cols x rank numbers to start the next step from.
///
/// Every rank has the same sums, and makes the same numbers of them.
class Matrices {
 public:
  virtual ~Matrices() = default;

  virtual int rank() const = 0;
  /// It takes less than to send the matrix as it is.
  bool pays(int64_t rows, int64_t cols) const { return rank() * (rows + cols) < rows * cols; }
  /// sums = this rank's part of the first round; the gradient is in the state afterwards.
  virtual void first(std::span<const float> gradient, int64_t rows, CodecState& state,
                     const RngKey& rng, std::span<float> sums) const = 0;
  /// Makes the second round's part of the first one's sums, which it changes, and takes what is
  /// sent out of the state.
  virtual void second(int64_t rows, int64_t cols, CodecState& state, std::span<float> first,
                      std::span<float> sums) const = 0;
  /// values = what both rounds say; what the next step begins with goes to the state.
  virtual void finish(int64_t rows, std::span<const float> first, std::span<const float> second,
                      CodecState& state, std::span<float> values) const = 0;
};

/// How a codec's messages are read that are elements and their indices.
class Selection {
 public:
  virtual ~Selection() = default;

  /// Elements in the message of `count`.
  virtual int64_t selected_count(int64_t count) const = 0;
  /// Appends those that are not zero, each index plus `first` among `ids`; in any order. Throws
  /// FaultError if the message has been damaged.
  virtual void read(const std::byte* message, int64_t count, int64_t first,
                    std::vector<int64_t>& ids, std::vector<float>& values) const = 0;
};

/// The codec that a spec names: "name" or "name:parameters", as in "dgc:0.001,momentum=0.9". "none"
/// is null. Throws UsageError with the names there are. The same spec gives the same object.
///
///  - fp16, bf16: casts. Add. Too large for fp16: infinite. NaN and infinities stay.
///  - fp8 (e4m3; fp8:e5m2), int8: a scale for every 256 elements. NaN or infinity: all 256 become
///    NaN.
///  - topk:RATIO, randk:RATIO: that share of the elements, one at least; those largest in magnitude
///    (NaN above infinity, among equals the first), or some that all ranks draw alike, which add;
///    where any element is NaN or infinite, the first of those drawn becomes NaN.
///  - dct:RATIO[,period=1000] (Gupta et al. 2020): what is above a threshold, at most that share;
///    the threshold is topk's, found anew after so many steps, or when far more or fewer elements
///    are above it. NaN or infinity: at least one of them is sent.
///  - dgc:RATIO[,momentum=0.9][,clip=NORM][,warmup=STEPS] (Lin et al. 2018): topk, its threshold
///    from a sample, of momentum that is corrected; gradients are clipped to NORM / sqrt(ranks)
///    before. In quarters of the warm-up the share is 1/4, 1/16, 1/64 and 1/256, if that is more.
///  - qsgd:BITS (2, 4 or 8; Alistarh et al. 2017): stochastic rounding to 2^(BITS-1) - 1 levels of
///    the norm of each 512 elements. Unbiased. NaN or infinity: all 512 become NaN.
///  - terngrad (Wen et al. 2017): -1, 0 or 1 times the largest magnitude of each 1024 elements, by
///    chance. Unbiased. NaN or infinity: all 1024 become NaN.
///  - signsgd (Bernstein et al. 2018): signs; together the majority's, 0 where they are even. A 0
///    votes by chance. NaN or infinity: all 1024 elements of its group become NaN.
///  - signum[:MOMENTUM] (likewise): the same of gradients' running mean, with 0.9.
///  - efsignsgd (Karimireddy et al. 2019): signs times the mean magnitude of each 1024 elements.
///  NaN
///    or infinity: none of the 1024 stays finite.
///  - onebit (Seide et al. 2014): of each 1024 elements the mean of what is not negative, or that
///  of
///    the rest. NaN or infinity: none of those with that sign stays finite.
///  - powersgd:RANK (Vogels et al. 2019): matrices as products of two of that rank, others as they
///    are. Add. NaN or infinity: the matrix becomes NaN.
///
/// With ",feedback=off" behind it, a codec with error feedback forgets what it does not send.
std::shared_ptr<const Codec> make_codec(std::string_view spec);
/// Names that `make_codec` knows, without "none".
std::vector<std::string> codec_names();

}  // namespace usbyte
