// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "arithmetic.h"
#include "codec/random.h"
#include "piece.h"

// How elements of a group become bits, and the group itself some numbers: what the codecs of
// csrc/codec that work by groups do on the host, to the bit but for the order of sums of doubles.
//
// A format has kElements of a group, kNumbers, kBits of an element; a Partial, to which all
// elements of a group add; a Sender, made of the whole Partial, that has the numbers and gives the
// codes of a few neighbours, the first of which is the group's `at`-th; and a Receiver, made of the
// numbers, that gives a code's value. Casts have no numbers.
namespace usbyte::kernels {

using usbyte::detail::bits_of;
using usbyte::detail::float_of;

constexpr uint32_t kInfinity = 0x7f800000;
constexpr float kLeastScaled = 0x1p-100F;  // codec/message.h

USBYTE_HD inline uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffff; }
USBYTE_HD inline bool is_finite(float x) { return magnitude(x) < kInfinity; }
USBYTE_HD inline float not_a_number() { return float_of(0x7fc00000); }

/// Bits of the largest magnitude.
struct Largest {
  uint32_t bits = 0;

  USBYTE_HD void add(float x) { join({magnitude(x)}); }
  USBYTE_HD void join(const Largest& other) { bits = bits < other.bits ? other.bits : bits; }
};

/// What comes of all elements of a group.
template <typename Partial>
struct Whole {
  Partial part;
  uint32_t count;
  uint64_t key;  ///< random numbers of the group
};

/// The bits of a few neighbours, the first in the lowest.
template <uint32_t Bits>
using Word = std::conditional_t<Bits == 16, uint64_t, uint32_t>;

template <uint32_t Bits, uint32_t N, typename Code>
USBYTE_HD Word<Bits> packed(const float (&x)[N], Code code) {
  Word<Bits> out = 0;
  USBYTE_UNROLL
  for (uint32_t i = 0; i < N; ++i) out |= Word<Bits>{code(x[i])} << (i * Bits);
  return out;
}

template <uint32_t Bits>
USBYTE_HD uint32_t code_of(Word<Bits> word, uint32_t i) {
  return static_cast<uint32_t>(word >> (i * Bits)) & ((1U << Bits) - 1);
}

template <uint32_t N>
USBYTE_HD uint32_t signs(const float (&x)[N]) {
  uint32_t out = 0;
  USBYTE_UNROLL
  for (uint32_t i = N; i-- > 0;) out = funnel_shift(bits_of(x[i]), out, 31);
  return out;
}

/// Nothing that is told of a group as a whole.
struct Nothing {
  uint32_t padding = 0;

  USBYTE_HD void add(float) {}
  USBYTE_HD void join(const Nothing&) {}
};

template <typename T>
struct CastFormat {
  static constexpr uint32_t kElements = 256, kNumbers = 0, kBits = 16;
  using Partial = Nothing;

  struct Sender {
    float numbers[1] = {};

    USBYTE_HD explicit Sender(const Whole<Partial>&) {}
    template <uint32_t N>
    USBYTE_HD uint64_t codes(const float (&x)[N], uint32_t) const {
      return packed<kBits>(x, [](float each) { return from_float<T>(each).bits; });
    }
  };

  struct Receiver {
    USBYTE_HD explicit Receiver(const float*) {}
    USBYTE_HD float value(uint32_t code) const { return to_float(T{static_cast<uint16_t>(code)}); }
  };
};

struct Int8 {
  static constexpr float kMost = 127;
  USBYTE_HD static uint32_t code(float x) { return (bits_of(x + 0x1.8p23F) - 0x4b400000U) & 0xff; }
  USBYTE_HD static float value(uint32_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

/// Floating point of 8 bits; see codec/loops_body.h.
template <uint32_t Mantissa, int Least, int Most>
struct Fp8 {
  static constexpr float kMost = Most;
  static constexpr uint32_t kDropped = 23 - Mantissa;
  static constexpr uint32_t kLeast = static_cast<uint32_t>(127 + Least) << 23;

  USBYTE_HD static uint32_t code(float x) {
    const float line = float_of((127 + Least + 23 - Mantissa) << 23);
    const uint32_t m = magnitude(x);
    const uint32_t rounded = m + ((1U << (kDropped - 1)) - 1) + (m >> kDropped & 1);
    const uint32_t normal = (rounded - (kLeast - (1U << 23))) >> kDropped;
    const uint32_t subnormal = bits_of(float_of(m) + line) - bits_of(line);
    return (bits_of(x) >> 24 & 0x80) | (m < kLeast ? subnormal : normal);
  }
  USBYTE_HD static float value(uint32_t code) {
    const float rebias = float_of(static_cast<uint32_t>(127 + 126 + Least) << 23);
    const float size = multiply(float_of((code & 0x7f) << kDropped), rebias);
    return float_of(bits_of(size) | (code & 0x80) << 24);
  }
};

/// A byte for each element, and a scale.
template <typename Byte>
struct ScaledFormat {
  static constexpr uint32_t kElements = 256, kNumbers = 1, kBits = 8;
  using Partial = Largest;

  struct Sender {
    float numbers[kNumbers];
    float up;
    bool finite;

    USBYTE_HD explicit Sender(const Whole<Partial>& whole) : finite(whole.part.bits < kInfinity) {
      const float most = float_of(whole.part.bits);
      const bool counts = most >= kLeastScaled;
      numbers[0] = !finite ? not_a_number() : counts ? most / Byte::kMost : 0;
      up = counts ? Byte::kMost / most : 0;
    }
    template <uint32_t N>
    USBYTE_HD uint32_t codes(const float (&x)[N], uint32_t) const {
      if (!finite) return 0;
      return packed<kBits>(x, [this](float each) { return Byte::code(multiply(each, up)); });
    }
  };

  struct Receiver {
    float scale;

    USBYTE_HD explicit Receiver(const float* numbers) : scale(numbers[0]) {}
    USBYTE_HD float value(uint32_t code) const { return multiply(Byte::value(code), scale); }
  };
};

/// x / Divisor, correctly rounded, without a division. Let g be the distance of floats around the
/// quotient: x is a multiple of it, and so, the divisor being odd, what lies between the quotient
/// and the middle of two floats an odd multiple of g / (2 * Divisor). The product of doubles is
/// less than 2^-28 g from the quotient, on the same side of every middle.
template <int32_t Divisor>
USBYTE_HD float divided_by(float x) {
  static_assert(Divisor % 2 == 1 && Divisor > 0 && Divisor < 256);
  if constexpr (Divisor == 1) return x;
  return static_cast<float>(multiply(static_cast<double>(x), 1.0 / Divisor));
}

/// `x`, at least 0 and less than 2^23, rounded down.
USBYTE_HD inline float whole_part(float x) {
#ifdef __CUDA_ARCH__
  return __fadd_rz(x, 0x1p23F) - 0x1p23F;  // the conversions take four times as long
#else
  return static_cast<float>(static_cast<int32_t>(x));
#endif
}

/// See codec/loops_body.h; its first step, and the others.
USBYTE_HD constexpr uint32_t folded(uint32_t x) { return x ^ (x >> 16); }
USBYTE_HD constexpr uint32_t mixed_folded(uint32_t x) {
  x *= 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return folded(x);
}

/// What random numbers of levels take from an element's place in its group alone.
struct MixedPlaces {
  alignas(kPieceBytes) uint32_t folded_mixed[1024];

  constexpr MixedPlaces() : folded_mixed() {
    for (uint32_t i = 0; i < 1024; ++i) folded_mixed[i] = folded(mixed_folded(folded(i)));
  }
};
// Of each side's own: neither reads the other's memory.
#ifdef __CUDACC__
static __device__ const MixedPlaces mixed_places_on_device;
#endif
inline constexpr MixedPlaces mixed_places_on_host;

/// One of a few equal levels of a number of the group, by chance.
template <uint32_t Elements, uint32_t Bits, typename PartialType>
struct LevelsFormat {
  static constexpr uint32_t kElements = Elements, kNumbers = 1, kBits = Bits;
  static constexpr int32_t kLevels = (1 << (Bits - 1)) - 1;
  static_assert(sizeof(MixedPlaces) >= Elements * sizeof(uint32_t));
  using Partial = PartialType;

  struct Sender {
    float numbers[kNumbers];
    float scale;
    uint32_t folded_key;

    USBYTE_HD explicit Sender(const Whole<Partial>& whole)
        : folded_key(folded(static_cast<uint32_t>(mix(whole.key)))) {
      const float most = whole.part.most();
      numbers[0] = !is_finite(most) ? not_a_number() : most < kLeastScaled ? 0 : most;
      scale = numbers[0] > 0 ? static_cast<float>(kLevels) / most : 0;
    }
    template <uint32_t N>
    USBYTE_HD uint32_t codes(const float (&x)[N], uint32_t at) const {
      uint32_t places[N];
      static_assert(sizeof places == kPieceBytes);
      load_aligned<kPieceBytes>(places, mixed_places() + at);
      // Codes are added up in floats, which hold 16 bits of them exactly: above zero, so that none
      // borrows from the next, and each with its highest bit turned over.
      constexpr uint32_t kHalf = 16 / kBits;
      uint32_t out = 0;
      USBYTE_UNROLL
      for (uint32_t begin = 0; begin < N; begin += kHalf) {
        float sum = 0x1p23F + static_cast<float>(kSigns & 0xffff);
        USBYTE_UNROLL
        for (uint32_t i = 0; i < kHalf && begin + i < N; ++i) {
          sum += level(x[begin + i], places[begin + i]) * static_cast<float>(1U << (i * kBits));
        }
        out |= (bits_of(sum) & 0xffff) << (begin * kBits);
      }
      return numbers[0] > 0 ? out ^ kSigns : 0;
    }

   private:
    /// The highest bits of four codes.
    static constexpr uint32_t kSigns = kBits == 8 ? 0x80808080U : kBits == 4 ? 0x8888U : 0xaaU;
    static_assert(kBits == 8 || kBits == 4 || kBits == 2);

    USBYTE_HD float level(float x, uint32_t place) const {
      const uint32_t random = mixed_folded(place ^ folded_key) & 0xffffff00U;
      // Of the two products the second is exact: it may be fused.
      const float raised = multiply(fabsf(x), scale) + static_cast<float>(random) * 0x1p-32F;
      const float kept = whole_part(fminf(raised, static_cast<float>(kLevels)));
      return float_of(bits_of(kept) | (bits_of(x) & 0x80000000U));
    }
    USBYTE_HD static const uint32_t* mixed_places() {
#ifdef __CUDA_ARCH__
      return mixed_places_on_device.folded_mixed;
#else
      return mixed_places_on_host.folded_mixed;
#endif
    }
  };

  struct Receiver {
    float step;

    USBYTE_HD explicit Receiver(const float* numbers) : step(divided_by<kLevels>(numbers[0])) {}
    USBYTE_HD float value(uint32_t code) const {
      const auto level = static_cast<int32_t>(code << (32 - Bits)) >> (32 - Bits);
      return multiply(static_cast<float>(level), step);
    }
  };
};

struct LargestLevel : Largest {
  USBYTE_HD void join(const LargestLevel& other) { Largest::join(other); }
  USBYTE_HD float most() const { return float_of(bits); }
};

struct NormLevel {
  double squares = 0;

  USBYTE_HD void add(float x) {
    const auto wide = static_cast<double>(x);
    squares += wide * wide;  // exact: it may be fused
  }
  USBYTE_HD void join(const NormLevel& other) { squares += other.squares; }
  USBYTE_HD float most() const { return static_cast<float>(sqrt(squares)); }
};

template <uint32_t Bits>
using QsgdFormat = LevelsFormat<512, Bits, NormLevel>;
using TernGradFormat = LevelsFormat<1024, 2, LargestLevel>;

/// Signs, and what the two stand for.
template <uint32_t Numbers>
struct SignsFormat {
  static constexpr uint32_t kElements = 1024, kNumbers = Numbers, kBits = 1;

  struct Receiver {
    float clear, set;

    USBYTE_HD explicit Receiver(const float* numbers)
        : clear(numbers[0]), set(Numbers == 2 ? numbers[Numbers - 1] : -numbers[0]) {}
    USBYTE_HD float value(uint32_t code) const { return code ? set : clear; }
  };
};

struct MajorityFormat : SignsFormat<1> {
  using Partial = Largest;

  struct Sender {
    float numbers[kNumbers];
    uint64_t key;

    USBYTE_HD explicit Sender(const Whole<Partial>& whole) : key(whole.key) {
      numbers[0] = whole.part.bits < kInfinity ? 1 : not_a_number();
    }
    /// A zero votes by chance.
    template <uint32_t N>
    USBYTE_HD uint32_t codes(const float (&x)[N], uint32_t at) const {
      static_assert(32 % N == 0);
      const uint32_t out = signs(x);
      bool any_zero = false;
      USBYTE_UNROLL
      for (uint32_t i = 0; i < N; ++i) any_zero = any_zero || x[i] == 0;
      if (!any_zero) return out;
      const uint32_t zeros = packed<1>(x, [](float each) { return uint32_t{each == 0}; });
      const auto random = static_cast<uint32_t>(mix(key + at / 32)) >> (at % 32);
      return (out & ~zeros) | (random & zeros);
    }
  };
};

struct EfSignFormat : SignsFormat<1> {
  struct Partial {
    double magnitudes = 0;
    USBYTE_HD void add(float x) { magnitudes += static_cast<double>(float_of(magnitude(x))); }
    USBYTE_HD void join(const Partial& other) { magnitudes += other.magnitudes; }
  };

  struct Sender {
    float numbers[kNumbers];

    USBYTE_HD explicit Sender(const Whole<Partial>& whole) {
      numbers[0] = static_cast<float>(whole.part.magnitudes / static_cast<double>(whole.count));
    }
    template <uint32_t N>
    USBYTE_HD uint32_t codes(const float (&x)[N], uint32_t) const {
      return signs(x);
    }
  };
};

struct OneBitFormat : SignsFormat<2> {
  struct Partial {
    double positive = 0, negative = 0;
    uint32_t negatives = 0, padding = 0;

    USBYTE_HD void add(float x) {
      const bool is_negative = bits_of(x) >> 31;
      (is_negative ? negative : positive) += static_cast<double>(x);
      negatives += is_negative;
    }
    USBYTE_HD void join(const Partial& other) {
      positive += other.positive;
      negative += other.negative;
      negatives += other.negatives;
    }
  };

  struct Sender {
    float numbers[kNumbers];

    USBYTE_HD explicit Sender(const Whole<Partial>& whole) {
      const Partial& p = whole.part;
      numbers[0] = mean(p.positive, whole.count - p.negatives);
      numbers[1] = mean(p.negative, p.negatives);
    }
    template <uint32_t N>
    USBYTE_HD uint32_t codes(const float (&x)[N], uint32_t) const {
      return signs(x);
    }

   private:
    USBYTE_HD static float mean(double total, uint32_t of) {
      return of == 0 ? 0.0F : static_cast<float>(total / static_cast<double>(of));
    }
  };
};

}  // namespace usbyte::kernels
