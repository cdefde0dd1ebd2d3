// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace usbyte {

/// The inner loops of codecs, compiled once for every x86-64 and once for those with AVX2 and F16C;
/// elsewhere once. All round alike, so that ranks on different processors stay equal to the bit: no
/// fused multiply-add, and sums that end in a message only.
///
/// Counts are elements. A set bit is a negative number's.
struct Loops {
  void (*to_fp16)(const float* in, uint16_t* out, int64_t count);
  void (*from_fp16)(const uint16_t* in, float* out, int64_t count);
  void (*to_bf16)(const float* in, uint16_t* out, int64_t count);
  void (*from_bf16)(const uint16_t* in, float* out, int64_t count);
  /// To nearest, ties to even, of in[i] * scale, which must be in range.
  void (*to_int8)(const float* in, float scale, int8_t* out, int64_t count);
  void (*from_int8)(const int8_t* in, float scale, float* out, int64_t count);
  void (*to_e4m3)(const float* in, float scale, uint8_t* out, int64_t count);
  void (*from_e4m3)(const uint8_t* in, float scale, float* out, int64_t count);
  void (*to_e5m2)(const float* in, float scale, uint8_t* out, int64_t count);
  void (*from_e5m2)(const uint8_t* in, float scale, float* out, int64_t count);
  /// Bits of the largest magnitude; any NaN is above infinity.
  uint32_t (*largest)(const float* in, int64_t count);
  double (*sum_of_positive)(const float* in, int64_t count);
  /// Of those with the sign bit.
  double (*sum_of_negative)(const float* in, int64_t count);
  double (*sum_of_magnitudes)(const float* in, int64_t count);
  double (*sum_of_squares)(const float* in, int64_t count);
  double (*dot)(const float* a, const float* b, int64_t count);
  /// Of sign bits, 32 to a word; a last word is filled with zeros.
  void (*to_signs)(const float* in, uint32_t* out, int64_t count);
  /// out[i] = the first or, where the bit is set, the second.
  void (*from_signs)(const uint32_t* in, float clear, float set, float* out, int64_t count);
  /// floor(|in[i]| * scale + u), u uniform in [0, 1), with in[i]'s sign; not above `most`.
  void (*to_levels)(const float* in, float scale, int32_t most, uint32_t key, int8_t* out,
                    int64_t count);
  /// out[i] += factor * in[i]
  void (*add)(const float* in, float factor, float* out, int64_t count);
  /// Indices, from `first` on, of elements whose magnitude has bits of at least `least`; returns
  /// how many. `out` has room for all.
  int64_t (*at_least)(const float* in, uint32_t least, uint32_t first, uint32_t* out,
                      int64_t count);
};

/// For this processor.
const Loops& loops();
/// For any.
const Loops& baseline_loops();

}  // namespace usbyte
