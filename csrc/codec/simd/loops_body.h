// SPDX-License-Identifier: Apache-2.0
// Included by each file that compiles the loops. Nothing here may be an inline function of another
// header: the linker keeps one copy of those, and it must run on every processor.

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "loops.h"

namespace usbyte {
namespace {

inline uint32_t bits(float x) {
  uint32_t out;
  memcpy(&out, &x, sizeof out);
  return out;
}

inline float number(uint32_t x) {
  float out;
  memcpy(&out, &x, sizeof out);
  return out;
}

inline uint32_t magnitude(float x) { return bits(x) & 0x7fffffff; }

constexpr int64_t kLanes = 8;

// IEEE 754 binary16, without branches; every NaN becomes one.
inline uint16_t half_of(float x) {
  const uint32_t sign = bits(x) >> 16 & 0x8000, m = magnitude(x);
  // Of what is normal, the exponent's bias changes and 13 bits are rounded away, into infinity if
  // need be; below that, adding 0.5 lines up the bits of a subnormal.
  const uint32_t normal = (m - (112U << 23) + 0xfff + (m >> 13 & 1)) >> 13;
  const uint32_t subnormal = bits(number(m) + 0.5F) - bits(0.5F);
  uint32_t out = m < (113U << 23) ? subnormal : normal;
  out = m >= 0x47800000 ? 0x7c00 : out;
  out = m > 0x7f800000 ? 0x7fff : out;
  return static_cast<uint16_t>(sign | out);
}

inline float float_of_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, m = h & 0x7fff;
  const uint32_t finite = bits(number(m << 13) * 0x1p112F);
  return number(sign | (m >= 0x7c00 ? m << 13 | 0x7f800000 : finite));
}

void to_fp16(const float* in, uint16_t* out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), packed);
  }
#endif
  for (; i < count; ++i) out[i] = half_of(in[i]);
}

void from_fp16(const uint16_t* in, float* out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(packed));
  }
#endif
  for (; i < count; ++i) out[i] = float_of_half(in[i]);
}

void to_bf16(const float* in, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t b = bits(in[i]);
    const uint32_t rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    out[i] = static_cast<uint16_t>((b & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
  }
}

void from_bf16(const uint16_t* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = number(static_cast<uint32_t>(in[i]) << 16);
}

// Rounds to a whole number, ties to even, if it is small: its last bits are those of the sum then.
constexpr float kRounder = 0x1.8p23F;

void to_int8(const float* in, float scale, int8_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<int8_t>(static_cast<int32_t>(bits(in[i] * scale + kRounder)) -
                                 static_cast<int32_t>(0x4b400000));
  }
}

void from_int8(const int8_t* in, float scale, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]) * scale;
}

// Floating point of 8 bits with `Mantissa` of them behind the point, and this least normal
// exponent. What comes is in range, so that no rounding leaves it.
template <int Mantissa, int Least>
void to_fp8(const float* in, float scale, uint8_t* out, int64_t count) {
  constexpr uint32_t kDropped = 23 - Mantissa;
  constexpr uint32_t kLeast = static_cast<uint32_t>(127 + Least) << 23;
  // The last bit of a subnormal is 2^(Least - Mantissa); that of this number too.
  const float line = number(static_cast<uint32_t>(127 + Least + 23 - Mantissa) << 23);
  for (int64_t i = 0; i < count; ++i) {
    const float x = in[i] * scale;
    const uint32_t sign = bits(x) >> 24 & 0x80, m = magnitude(x);
    const uint32_t rounded = m + ((1U << (kDropped - 1)) - 1) + (m >> kDropped & 1);
    const uint32_t normal = (rounded - (kLeast - (1U << 23))) >> kDropped;
    const uint32_t subnormal = bits(number(m) + line) - bits(line);
    out[i] = static_cast<uint8_t>(sign | (m < kLeast ? subnormal : normal));
  }
}

template <int Mantissa, int Least>
void from_fp8(const uint8_t* in, float scale, float* out, int64_t count) {
  const float rebias = number(static_cast<uint32_t>(127 + 126 + Least) << 23);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t byte = in[i];
    const float value = number((byte & 0x7f) << (23 - Mantissa)) * rebias;
    out[i] = number(bits(value) | (byte & 0x80) << 24) * scale;
  }
}

uint32_t largest(const float* in, int64_t count) {
  int32_t out = 0;  // of numbers without a sign bit
  for (int64_t i = 0; i < count; ++i) {
    const int32_t m = static_cast<int32_t>(magnitude(in[i]));
    out = m > out ? m : out;
  }
  return static_cast<uint32_t>(out);
}

// Of term(i) for each i; in lanes, which the compiler would not make by itself.
template <typename Term>
double sum_of(int64_t count, Term term) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += term(i + k);
  }
  for (; i < count; ++i) lanes[i % kLanes] += term(i);
  double out = 0;
  for (double lane : lanes) out += lane;
  return out;
}

// All bits set if the number has the sign bit.
inline uint32_t sign_mask(float x) { return 0 - (bits(x) >> 31); }

double sum_of_positive(const float* in, int64_t count) {
  return sum_of(count, [in](int64_t i) {
    return static_cast<double>(number(bits(in[i]) & ~sign_mask(in[i])));
  });
}

double sum_of_negative(const float* in, int64_t count) {
  return sum_of(count, [in](int64_t i) {
    return static_cast<double>(number(bits(in[i]) & sign_mask(in[i])));
  });
}

double sum_of_magnitudes(const float* in, int64_t count) {
  return sum_of(count, [in](int64_t i) { return static_cast<double>(number(magnitude(in[i]))); });
}

double dot(const float* a, const float* b, int64_t count) {
  return sum_of(
      count, [a, b](int64_t i) { return static_cast<double>(a[i]) * static_cast<double>(b[i]); });
}

double sum_of_squares(const float* in, int64_t count) { return dot(in, in, count); }

void to_signs(const float* in, uint32_t* out, int64_t count) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    uint32_t word = 0;
#if defined(__AVX2__)
    for (int k = 0; k < 4; ++k) {
      const int mask = _mm256_movemask_ps(_mm256_loadu_ps(in + i + 8 * k));
      word |= static_cast<uint32_t>(mask) << (8 * k);
    }
#elif defined(__SSE2__)
    for (int k = 0; k < 8; ++k) {
      const int mask = _mm_movemask_ps(_mm_loadu_ps(in + i + 4 * k));
      word |= static_cast<uint32_t>(mask) << (4 * k);
    }
#else
    for (int k = 0; k < 32; ++k) word |= bits(in[i + k]) >> 31 << k;
#endif
    out[i / 32] = word;
  }
  if (i == count) return;
  uint32_t word = 0;
  for (int64_t k = i; k < count; ++k) word |= bits(in[k]) >> 31 << (k - i);
  out[i / 32] = word;
}

void from_signs(const uint32_t* in, float clear, float set, float* out, int64_t count) {
  const uint32_t from = bits(clear), flip = bits(clear) ^ bits(set);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const uint32_t word = in[i / 32];
    for (uint32_t k = 0; k < 32; ++k) {
      out[i + k] = number(from ^ (flip & (0 - (word >> k & 1))));
    }
  }
  for (; i < count; ++i) out[i] = number(from ^ (flip & (0 - (in[i / 32] >> (i % 32) & 1))));
}

// A bijection of 32-bit numbers that spreads every bit (Wellons's lowbias32).
inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

void to_levels(const float* in, float scale, int32_t most, uint32_t key, int8_t* out,
               int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t random = mix(mix(static_cast<uint32_t>(i)) ^ key);
    const float u = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24F;
    const int32_t level = static_cast<int32_t>(number(magnitude(in[i])) * scale + u);
    const int32_t kept = level < most ? level : most;
    out[i] = static_cast<int8_t>(bits(in[i]) >> 31 ? -kept : kept);
  }
}

void add(const float* in, float factor, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] += factor * in[i];
}

int64_t at_least(const float* in, uint32_t least, uint32_t first, uint32_t* out, int64_t count) {
  int64_t found = 0, i = 0;
#if defined(__AVX2__)
  const __m256i bound = _mm256_set1_epi32(static_cast<int32_t>(least) - 1);
  const __m256i unsigned_bits = _mm256_set1_epi32(0x7fffffff);
  for (; i + kLanes <= count; i += kLanes) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(x, unsigned_bits), bound);
    for (int mask = _mm256_movemask_ps(_mm256_castsi256_ps(above)); mask; mask &= mask - 1) {
      out[found++] = first + static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(mask));
    }
  }
#elif defined(__SSE2__)
  const __m128i bound = _mm_set1_epi32(static_cast<int32_t>(least) - 1);
  const __m128i unsigned_bits = _mm_set1_epi32(0x7fffffff);
  for (; i + 4 <= count; i += 4) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    const __m128i above = _mm_cmpgt_epi32(_mm_and_si128(x, unsigned_bits), bound);
    for (int mask = _mm_movemask_ps(_mm_castsi128_ps(above)); mask; mask &= mask - 1) {
      out[found++] = first + static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(mask));
    }
  }
#endif
  for (; i < count; ++i) {
    if (magnitude(in[i]) >= least) out[found++] = first + static_cast<uint32_t>(i);
  }
  return found;
}

constexpr Loops kLoops = {to_fp16,         from_fp16,         to_bf16,        from_bf16,
                          to_int8,         from_int8,         to_fp8<3, -6>,  from_fp8<3, -6>,
                          to_fp8<2, -14>,  from_fp8<2, -14>,  largest,        sum_of_positive,
                          sum_of_negative, sum_of_magnitudes, sum_of_squares, dot,
                          to_signs,        from_signs,        to_levels,      add,
                          at_least};

}  // namespace
}  // namespace usbyte
