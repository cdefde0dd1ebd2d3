#pragma once

#include <bit>
#include <limits>

#include "random.h"
#include "signs.h"

namespace usbyte::codecs {

/// Signs that the ranks vote with.
class Majority : public Signs {
 public:
  bool relays() const override { return false; }

  void encode(std::span<const float> values, const Draw& draw, std::byte* message) const override {
    Signs::encode(values, draw, message);
    let_zeros_draw(values, draw, at<uint32_t>(message, 8));
  }
  void combine(std::span<const std::byte* const> messages, const Draw& draw,
               std::span<float> values) const override {
    Codec::combine(messages, draw, values);
    for (float& x : values) {
      if (x != 0) x = x > 0 ? 1.0F : x < 0 ? -1.0F : x;  // else it is not a number
    }
  }

 private:
  Meaning meaning_of(std::span<const float> values, const uint32_t*) const override {
    if (loops().largest(values.data(), std::ssize(values)) >= kInfinityBits) {
      return {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN()};
    }
    return {1, -1};
  }

  // A bit cannot abstain; a rank without an opinion must not push the same way in every step.
  static void let_zeros_draw(std::span<const float> values, const Draw& draw, uint32_t* signs) {
    in_pieces(std::ssize(values), [&](int64_t begin, int64_t count) {
      float marks[1024];
      uint32_t zeros[1024 / 32];
      for (int64_t i = 0; i < count; ++i) {  // one less than 0 is negative
        const uint32_t magnitude = std::bit_cast<uint32_t>(values[begin + i]) & 0x7fffffff;
        marks[i] = std::bit_cast<float>(magnitude - 1);
      }
      loops().to_signs(marks, zeros, count);
      for (int64_t w = 0; w < (count + 31) / 32; ++w) {
        if (zeros[w] == 0) continue;
        uint32_t& word = signs[begin / 32 + w];
        const auto drawn = static_cast<uint32_t>(mix(draw.own + static_cast<uint64_t>(begin + w)));
        word = (word & ~zeros[w]) | (drawn & zeros[w]);
      }
    });
  }
};

}  // namespace usbyte::codecs
