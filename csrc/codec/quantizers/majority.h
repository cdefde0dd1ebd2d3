// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <limits>

#include "codec/message.h"
#include "codec/random.h"
#include "grouped.h"

namespace usbyte::codecs {

/// Signs that the ranks vote with, times 1 or, where a group holds what is not finite, NaN.
class Majority : public Grouped {
 public:
  bool relays() const final { return false; }

  void combine(std::span<const std::byte* const> messages, const RngKey& rng,
               std::span<float> values) const final {
    Codec::combine(messages, rng, values);
    for (float& x : values) {
      if (x != 0) x = x > 0 ? 1.0F : x < 0 ? -1.0F : x;  // else it is not a number
    }
  }

 protected:
  Majority() : Grouped(GroupCodec::Kind::majority, kMostElements, 1, 1) {}

 private:
  void encode_group(std::span<const float> values, uint64_t key, float* one,
                    uint8_t* packed) const final {
    const bool finite = loops().largest(values.data(), std::ssize(values)) < kInfinityBits;
    *one = finite ? 1 : std::numeric_limits<float>::quiet_NaN();
    auto* const signs = reinterpret_cast<uint32_t*>(packed);
    loops().to_signs(values.data(), signs, std::ssize(values));
    let_zeros_draw(values, key, signs);
  }
  void decode_group(const float* one, const uint8_t* packed, std::span<float> values) const final {
    loops().from_signs(reinterpret_cast<const uint32_t*>(packed), *one, -*one, values.data(),
                       std::ssize(values));
  }

  // A bit cannot abstain; a rank without an opinion must not push the same way in every step.
  static void let_zeros_draw(std::span<const float> values, uint64_t key, uint32_t* signs) {
    float marks[kMostElements];
    uint32_t zeros[kMostElements / 32];
    for (size_t i = 0; i < values.size(); ++i) {  // one less than 0 is negative
      marks[i] = std::bit_cast<float>((std::bit_cast<uint32_t>(values[i]) & 0x7fffffff) - 1);
    }
    loops().to_signs(marks, zeros, std::ssize(values));
    for (size_t w = 0; w < (values.size() + 31) / 32; ++w) {
      if (zeros[w] == 0) continue;
      signs[w] = (signs[w] & ~zeros[w]) | (static_cast<uint32_t>(mix(key + w)) & zeros[w]);
    }
  }
};

}  // namespace usbyte::codecs
