// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ranks.h"
#include "usbyte/codec.h"

// What tests of codecs share.
namespace usbyte::test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Gradients: of many magnitudes, some zeros, some equal.
inline std::vector<float> gradient(Random& random, int64_t count) {
  std::normal_distribution<float> normal(0, std::exp2(static_cast<float>(random(-8, 8))));
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) {
    x = random.one_in(8) ? 0.0F : normal(random.engine());
    if (random.one_in(16)) x = random.one_in(2) ? 0.25F : -0.25F;
    if (random.one_in(32)) x = -0.0F;
  }
  return out;
}

// Encodes into memory whose surroundings must stay as they are.
inline std::vector<std::byte> encoded(const Codec& codec, const std::vector<float>& values,
                                      const RngKey& rng = {}) {
  constexpr size_t kGuard = 64;
  const auto bytes = static_cast<size_t>(codec.message_bytes(std::ssize(values)));
  std::vector<std::byte> memory(bytes + 2 * kGuard, std::byte{0xa5});
  codec.encode(values, rng, memory.data() + kGuard);
  for (size_t i = 0; i < kGuard; ++i) {
    EXPECT_EQ(memory[i], std::byte{0xa5});
    EXPECT_EQ(memory[kGuard + bytes + i], std::byte{0xa5});
  }
  return {memory.begin() + kGuard, memory.begin() + static_cast<std::ptrdiff_t>(kGuard + bytes)};
}

inline std::vector<float> decoded(const Codec& codec, const std::vector<std::byte>& message,
                                  size_t count, const RngKey& rng = {}) {
  std::vector<float> out(count, 77.0F);
  codec.decode(message.data(), rng, out);
  return out;
}

inline std::vector<float> through(const std::string& spec, const std::vector<float>& values,
                                  const RngKey& rng = {}) {
  const auto codec = make_codec(spec);
  return decoded(*codec, encoded(*codec, values, rng), values.size(), rng);
}

inline double largest(const float* values, size_t count) {
  double out = 0;
  for (size_t i = 0; i < count; ++i) out = std::max(out, std::abs(double{values[i]}));
  return out;
}

inline double norm(const std::vector<float>& values) {
  double squares = 0;
  for (float x : values) squares += double{x} * x;
  return std::sqrt(squares);
}

}  // namespace usbyte::test
