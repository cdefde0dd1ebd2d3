// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define USBYTE_HD __host__ __device__
#else
#define USBYTE_HD
#endif

// The 16-bit floating-point types as storage, and their conversions: rounded to nearest, ties to
// even, subnormals kept, overflow to infinity, every NaN to 0x7fff, on the host as on the device.
namespace usbyte {

/// IEEE 754 binary16: torch.float16.
struct Half {
  uint16_t bits;
};

/// The upper half of an IEEE 754 binary32: torch.bfloat16.
struct BFloat16 {
  uint16_t bits;
};

namespace detail {

USBYTE_HD inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

USBYTE_HD inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// bits / 2^shift, rounded to nearest, ties to even. `shift` is from 1 to 31.
USBYTE_HD inline uint32_t shift_to_nearest(uint32_t bits, uint32_t shift) {
  const uint32_t below_half = (uint32_t{1} << (shift - 1)) - 1;
  return (bits + below_half + ((bits >> shift) & 1)) >> shift;
}

}  // namespace detail

USBYTE_HD inline float to_float(float value) { return value; }

USBYTE_HD inline float to_float(BFloat16 value) {
  return detail::float_of(uint32_t{value.bits} << 16);
}

USBYTE_HD inline float to_float(Half value) {
#ifdef __CUDA_ARCH__
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
#else
  const uint32_t sign = (value.bits & 0x8000U) << 16;
  const uint32_t magnitude = value.bits & 0x7fffU;
  if (magnitude >= 0x7c00) return detail::float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return detail::float_of(sign | ((magnitude << 13) + (112U << 23)));
  // A subnormal counts in units of 2^-24, which a float holds exactly.
  const float size = static_cast<float>(magnitude) * 0x1p-24F;
  return detail::float_of(sign | detail::bits_of(size));
#endif
}

/// `value` as a T; T is float, Half or BFloat16.
template <typename T>
USBYTE_HD T from_float(float value);

template <>
USBYTE_HD inline float from_float<float>(float value) {
  return value;
}

template <>
USBYTE_HD inline BFloat16 from_float<BFloat16>(float value) {
#ifdef __CUDA_ARCH__
  BFloat16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
#else
  const uint32_t bits = detail::bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {static_cast<uint16_t>(detail::shift_to_nearest(bits, 16))};
#endif
}

template <>
USBYTE_HD inline Half from_float<Half>(float value) {
#ifdef __CUDA_ARCH__
  Half out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
#else
  const uint32_t bits = detail::bits_of(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {0x7fff};
  uint32_t out = 0;
  if (magnitude >= 0x47800000) {  // 2^16 and more: infinity; what is less may still round up to it
    out = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // 2^-14: the least normal
    out = detail::shift_to_nearest(magnitude - (112U << 23), 13);
  } else if (magnitude >= 0x33000000) {  // 2^-25: half of the least subnormal
    const uint32_t significand = 0x800000 | (magnitude & 0x7fffff);
    out = detail::shift_to_nearest(significand, 126 - (magnitude >> 23));
  }
  return {static_cast<uint16_t>(sign | out)};
#endif
}

}  // namespace usbyte
