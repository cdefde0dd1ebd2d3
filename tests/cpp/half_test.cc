// SPDX-License-Identifier: Apache-2.0
#include "support/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace usbyte {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What defines the formats: bits of the exponent and of the significand.
struct HalfFormat {
  using Type = Half;
  static constexpr int kExponent = 5, kSignificand = 10;
};
struct BFloat16Format {
  using Type = BFloat16;
  static constexpr int kExponent = 8, kSignificand = 7;
};

template <typename Format>
class HalfTest : public testing::Test {
 protected:
  using T = typename Format::Type;
  static constexpr int kBias = (1 << (Format::kExponent - 1)) - 1;
  static constexpr uint16_t kInfinite =
      static_cast<uint16_t>(((1 << Format::kExponent) - 1) << Format::kSignificand);

  // The value of bits without a sign, by the definition of IEEE 754.
  static double value(uint16_t bits) {
    const int exponent = bits >> Format::kSignificand;
    const int significand = bits & ((1 << Format::kSignificand) - 1);
    if (exponent == 0) return std::ldexp(significand, 1 - kBias - Format::kSignificand);
    return std::ldexp(significand + (1 << Format::kSignificand),
                      exponent - kBias - Format::kSignificand);
  }
  static uint16_t rounded(float x) { return from_float<T>(x).bits; }
  static float widened(int bits) { return to_float(T{static_cast<uint16_t>(bits)}); }
  static uint16_t negative(uint16_t bits) { return static_cast<uint16_t>(bits | 0x8000); }
};

using Formats = testing::Types<HalfFormat, BFloat16Format>;
TYPED_TEST_SUITE(HalfTest, Formats);

TYPED_TEST(HalfTest, EveryFiniteValueGoesThereAndBack) {
  for (uint16_t bits = 0; bits < this->kInfinite; ++bits) {
    const double want = this->value(bits);
    ASSERT_EQ(this->widened(bits), want) << bits;
    ASSERT_EQ(this->widened(this->negative(bits)), -want) << bits;
    ASSERT_EQ(this->rounded(static_cast<float>(want)), bits);
    ASSERT_EQ(this->rounded(static_cast<float>(-want)), this->negative(bits));
  }
}

// Rounding is monotonic, so that the middle between neighbours and the floats next to it prove all.
TYPED_TEST(HalfTest, RoundsToNearestTiesToEven) {
  for (uint16_t bits = 0; bits < this->kInfinite; ++bits) {
    const auto above = static_cast<uint16_t>(bits + 1);  // infinity counts as the next value here
    const auto middle = static_cast<float>((this->value(bits) + this->value(above)) / 2);
    const uint16_t even = bits % 2 == 0 ? bits : above;
    ASSERT_EQ(this->rounded(middle), even) << bits;
    ASSERT_EQ(this->rounded(-middle), this->negative(even)) << bits;
    ASSERT_EQ(this->rounded(std::nextafter(middle, 0.0F)), bits) << bits;
    ASSERT_EQ(this->rounded(std::nextafter(middle, kInfinity)), above) << bits;
  }
}

TYPED_TEST(HalfTest, KeepsInfinitiesAndMakesThemOfWhatIsTooLarge) {
  const uint16_t infinite = this->kInfinite;
  EXPECT_EQ(this->rounded(kInfinity), infinite);
  EXPECT_EQ(this->rounded(-kInfinity), this->negative(infinite));
  EXPECT_EQ(this->rounded(std::numeric_limits<float>::max()), infinite);
  EXPECT_EQ(this->widened(infinite), kInfinity);
  EXPECT_EQ(this->widened(this->negative(infinite)), -kInfinity);
}

TYPED_TEST(HalfTest, EveryNaNStaysOne) {
  for (int bits = this->kInfinite + 1; bits < 0x8000; ++bits) {
    ASSERT_TRUE(std::isnan(this->widened(bits))) << bits;
    ASSERT_TRUE(std::isnan(this->widened(bits | 0x8000))) << bits;
  }
  EXPECT_EQ(this->rounded(std::numeric_limits<float>::quiet_NaN()), 0x7fff);
  EXPECT_EQ(this->rounded(std::numeric_limits<float>::signaling_NaN()), 0x7fff);
  EXPECT_EQ(this->rounded(detail::float_of(0xff800001)), 0x7fff);
}

TYPED_TEST(HalfTest, WhatIsTooSmallBecomesZeroOfItsSign) {
  EXPECT_EQ(this->rounded(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(this->rounded(-std::numeric_limits<float>::denorm_min()), 0x8000);
  EXPECT_EQ(this->rounded(-0.0F), 0x8000);
}

}  // namespace
}  // namespace usbyte
