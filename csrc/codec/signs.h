#pragma once

#include "message.h"
#include "usbyte/codec.h"

namespace usbyte::codecs {

/// Codecs that send each element's sign (set: negative; 0 and -0 keep theirs), and what the two
/// signs stand for: two numbers, then the bits.
class Signs : public Codec {
 public:
  int64_t message_bytes(int64_t count) const override {
    return count == 0 ? 0 : 8 + 4 * ((count + 31) / 32);
  }

  void encode(std::span<const float> values, const Draw&, std::byte* message) const override {
    if (values.empty()) return;
    uint32_t* const signs = at<uint32_t>(message, 8);
    loops().to_signs(values.data(), signs, std::ssize(values));
    const Meaning meaning = meaning_of(values, signs);
    at<float>(message, 0)[0] = meaning.clear;
    at<float>(message, 0)[1] = meaning.set;
  }
  void decode(const std::byte* message, const Draw&, std::span<float> values) const override {
    decode(message, 0, std::ssize(values), values.data());
  }
  void decode_add(const std::byte* message, const Draw&, float factor,
                  std::span<float> values) const override {
    add_decoded(values, factor, [&](int64_t begin, int64_t count, float* out) {
      decode(message, begin, count, out);
    });
  }

 protected:
  struct Meaning {
    float clear, set;
  };

 private:
  /// At least one value.
  virtual Meaning meaning_of(std::span<const float> values, const uint32_t* signs) const = 0;

  static void decode(const std::byte* message, int64_t begin, int64_t count, float* out) {
    if (count == 0) return;
    const float* const meaning = at<float>(message, 0);
    loops().from_signs(at<uint32_t>(message, 8 + begin / 8), meaning[0], meaning[1], out, count);
  }
};

}  // namespace usbyte::codecs
