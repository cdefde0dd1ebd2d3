#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/tensor.h"

namespace usbyte {

/// What random choices are made from: every rank has the same `shared` for an op of a step, and
/// another `own`.
struct Draw {
  uint64_t shared = 0;
  uint64_t own = 0;

  /// Of the block that begins at element `begin`.
  static Draw of(uint64_t seed, int64_t step, int64_t begin, int rank);
};

/// Makes a run of float32 smaller for the network, with some loss. Immutable, thread-safe,
/// deterministic for a given Draw.
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
  /// Training needs what is lost to be added to the next gradient.
  virtual bool wants_feedback() const { return true; }

  virtual void encode(std::span<const float> values, const Draw& draw,
                      std::byte* message) const = 0;
  /// values = what the message says.
  virtual void decode(const std::byte* message, const Draw& draw,
                      std::span<float> values) const = 0;
  /// values += factor * what the message says.
  virtual void decode_add(const std::byte* message, const Draw& draw, float factor,
                          std::span<float> values) const = 0;
  /// values = what the messages of all ranks, in order of ranks, mean together: their sum, unless a
  /// codec says otherwise. At least one message.
  virtual void combine(std::span<const std::byte* const> messages, const Draw& draw,
                       std::span<float> values) const;
};

/// The codec that a spec names: "name" or "name:parameter". "none" is null. Throws UsageError with
/// the names there are.
///
///  - fp16, bf16: casts. Add. Too large for fp16: infinite. NaN and infinities stay.
///  - fp8 (e4m3; fp8:e5m2), int8: a scale for every 256 elements. NaN or infinity: all 256 become
///    NaN.
///  - topk:RATIO, randk:RATIO: that share of the elements, one at least; those largest in magnitude
///    (NaN above infinity, among equals the first), or some that all ranks draw alike, which add.
///  - qsgd:BITS (2, 4 or 8; Alistarh et al. 2017): stochastic rounding to 2^(BITS-1) - 1 levels of
///    the norm of each 512 elements. Unbiased. NaN or infinity: all 512 become NaN.
///  - terngrad (Wen et al. 2017): -1, 0 or 1 times the largest magnitude, by chance. Unbiased. NaN
///    or infinity: all elements of the block become NaN.
///  - signsgd (Bernstein et al. 2018): signs; together the majority's, 0 where they are even. 0
///    counts as positive. NaN or infinity: the block becomes NaN.
///  - efsignsgd (Karimireddy et al. 2019): signs times the mean magnitude. NaN or infinity: the
///    block becomes NaN.
///  - onebit (Seide et al. 2014): the mean of what is not negative, or that of the rest. Likewise.
std::shared_ptr<const Codec> make_codec(std::string_view spec);
/// Names that `make_codec` knows, without "none".
std::vector<std::string> codec_names();

}  // namespace usbyte
