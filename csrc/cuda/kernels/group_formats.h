#pragma once

#include <cmath>
#include <cstdint>

#include "../../codec/random.h"
#include "arithmetic.h"

// How elements of a group become bits, and the group itself some numbers: what the codecs of
// csrc/codec that work by groups do on the host, to the bit but for the order of sums of doubles.
//
// A format has kElements of a group, kNumbers, kBits of an element; a Part, to which all elements
// of a group add; a Sender, made of the whole Part, that has the numbers and gives an element's
// code; and value(numbers, code). Casts have no numbers.
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
template <typename Part>
struct Whole {
  Part part;
  uint32_t count;
  uint64_t key;  ///< random numbers of the group
};

/// Nothing that is told of a group as a whole.
struct Nothing {
  uint32_t padding = 0;

  USBYTE_HD void add(float) {}
  USBYTE_HD void join(const Nothing&) {}
};

template <typename T>
struct CastFormat {
  static constexpr uint32_t kElements = 256, kNumbers = 0, kBits = 16;
  using Part = Nothing;

  struct Sender {
    float numbers[1] = {};

    USBYTE_HD explicit Sender(const Whole<Part>&) {}
    USBYTE_HD uint32_t code(float x, uint32_t) const { return from_float<T>(x).bits; }
  };

  USBYTE_HD static float value(const float*, uint32_t code) {
    return to_float(T{static_cast<uint16_t>(code)});
  }
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
  using Part = Largest;

  struct Sender {
    float numbers[kNumbers];
    float up;
    bool finite;

    USBYTE_HD explicit Sender(const Whole<Part>& whole) : finite(whole.part.bits < kInfinity) {
      const float most = float_of(whole.part.bits);
      const bool counts = most >= kLeastScaled;
      numbers[0] = !finite ? not_a_number() : counts ? most / Byte::kMost : 0;
      up = counts ? Byte::kMost / most : 0;
    }
    USBYTE_HD uint32_t code(float x, uint32_t) const {
      return finite ? Byte::code(multiply(x, up)) : 0;
    }
  };

  USBYTE_HD static float value(const float* numbers, uint32_t code) {
    return multiply(Byte::value(code), numbers[0]);
  }
};

/// One of a few equal levels of a number of the group, by chance.
template <uint32_t Elements, uint32_t Bits, typename PartType>
struct LevelsFormat {
  static constexpr uint32_t kElements = Elements, kNumbers = 1, kBits = Bits;
  static constexpr int32_t kLevels = (1 << (Bits - 1)) - 1;
  using Part = PartType;

  struct Sender {
    float numbers[kNumbers];
    float scale;
    uint32_t key;

    USBYTE_HD explicit Sender(const Whole<Part>& whole)
        : key(static_cast<uint32_t>(mix(whole.key))) {
      const float most = whole.part.most();
      numbers[0] = !is_finite(most) ? not_a_number() : most < kLeastScaled ? 0 : most;
      scale = numbers[0] > 0 ? static_cast<float>(kLevels) / most : 0;
    }
    USBYTE_HD uint32_t code(float x, uint32_t i) const {
      if (!(numbers[0] > 0)) return 0;
      const uint32_t random = mixed(mixed(i) ^ key);
      const float u = multiply(static_cast<float>(random >> 8), 0x1p-24F);
      const auto level = static_cast<int32_t>(multiply(float_of(magnitude(x)), scale) + u);
      const int32_t kept = level < kLevels ? level : kLevels;
      return static_cast<uint32_t>(bits_of(x) >> 31 ? -kept : kept) & ((1U << Bits) - 1);
    }

   private:
    /// See codec/loops_body.h.
    USBYTE_HD static uint32_t mixed(uint32_t x) {
      x = (x ^ (x >> 16)) * 0x7feb352dU;
      x = (x ^ (x >> 15)) * 0x846ca68bU;
      return x ^ (x >> 16);
    }
  };

  USBYTE_HD static float value(const float* numbers, uint32_t code) {
    const auto level = static_cast<int32_t>(code << (32 - Bits)) >> (32 - Bits);
    return multiply(static_cast<float>(level), numbers[0] / static_cast<float>(kLevels));
  }
};

struct LargestLevel : Largest {
  USBYTE_HD void join(const LargestLevel& other) { Largest::join(other); }
  USBYTE_HD float most() const { return float_of(bits); }
};

struct NormLevel {
  double squares = 0;

  USBYTE_HD void add(float x) {
    squares += multiply(static_cast<double>(x), static_cast<double>(x));
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

  USBYTE_HD static float value(const float* numbers, uint32_t code) {
    const float set = Numbers == 2 ? numbers[Numbers - 1] : -numbers[0];
    return code ? set : numbers[0];
  }
};

struct MajorityFormat : SignsFormat<1> {
  using Part = Largest;

  struct Sender {
    float numbers[kNumbers];
    uint64_t key;

    USBYTE_HD explicit Sender(const Whole<Part>& whole) : key(whole.key) {
      numbers[0] = whole.part.bits < kInfinity ? 1 : not_a_number();
    }
    /// A zero votes by chance.
    USBYTE_HD uint32_t code(float x, uint32_t i) const {
      if (magnitude(x) > 0) return bits_of(x) >> 31;
      return static_cast<uint32_t>(mix(key + i / 32)) >> (i % 32) & 1;
    }
  };
};

struct EfSignFormat : SignsFormat<1> {
  struct Part {
    double magnitudes = 0;
    USBYTE_HD void add(float x) { magnitudes += static_cast<double>(float_of(magnitude(x))); }
    USBYTE_HD void join(const Part& other) { magnitudes += other.magnitudes; }
  };

  struct Sender {
    float numbers[kNumbers];

    USBYTE_HD explicit Sender(const Whole<Part>& whole) {
      numbers[0] = static_cast<float>(whole.part.magnitudes / static_cast<double>(whole.count));
    }
    USBYTE_HD uint32_t code(float x, uint32_t) const { return bits_of(x) >> 31; }
  };
};

struct OneBitFormat : SignsFormat<2> {
  struct Part {
    double positive = 0, negative = 0;
    uint32_t negatives = 0, padding = 0;

    USBYTE_HD void add(float x) {
      const bool is_negative = bits_of(x) >> 31;
      (is_negative ? negative : positive) += static_cast<double>(x);
      negatives += is_negative;
    }
    USBYTE_HD void join(const Part& other) {
      positive += other.positive;
      negative += other.negative;
      negatives += other.negatives;
    }
  };

  struct Sender {
    float numbers[kNumbers];

    USBYTE_HD explicit Sender(const Whole<Part>& whole) {
      const Part& p = whole.part;
      numbers[0] = mean(p.positive, whole.count - p.negatives);
      numbers[1] = mean(p.negative, p.negatives);
    }
    USBYTE_HD uint32_t code(float x, uint32_t) const { return bits_of(x) >> 31; }

   private:
    USBYTE_HD static float mean(double total, uint32_t of) {
      return of == 0 ? 0.0F : static_cast<float>(total / static_cast<double>(of));
    }
  };
};

}  // namespace usbyte::kernels
