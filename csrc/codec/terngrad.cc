#include <bit>
#include <limits>

#include "make.h"
#include "message.h"
#include "random.h"

namespace usbyte::codecs {
namespace {

// The largest magnitude, then two bits for each element. W. Wen et al., "TernGrad: Ternary
// Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS 2017; each block of a
// plan is what the paper calls a layer. Without its clipping, which is not unbiased.
class TernGrad final : public Codec {
 public:
  std::string spec() const override { return "terngrad"; }
  int64_t message_bytes(int64_t count) const override {
    return count == 0 ? 0 : 4 + round_up((count + 3) / 4, 4);
  }
  int memories() const override { return 0; }

  void encode(std::span<const float> values, const Draw& draw, std::byte* message) const override {
    const int64_t size = std::ssize(values);
    if (size == 0) return;
    uint8_t* const packed = at<uint8_t>(message, 4);
    std::fill(packed, at<uint8_t>(message, message_bytes(size)), uint8_t{0});
    const uint32_t bits = loops().largest(values.data(), size);
    float most = std::bit_cast<float>(bits);
    if (bits >= kInfinityBits) most = std::numeric_limits<float>::quiet_NaN();
    if (most < kLeastScaled) most = 0;
    *at<float>(message, 0) = most;
    if (!(most > 0)) return;
    in_pieces(size, [&](int64_t begin, int64_t count) {
      int8_t levels[1024];
      const auto key = static_cast<uint32_t>(mix(draw.own + static_cast<uint64_t>(begin)));
      loops().to_levels(values.data() + begin, 1 / most, 1, key, levels, count);
      pack(levels, 2, packed + begin / 4, count);
    });
  }

  void decode(const std::byte* message, const Draw&, std::span<float> values) const override {
    in_pieces(std::ssize(values), [&](int64_t begin, int64_t count) {
      decode(message, begin, count, values.data() + begin);
    });
  }
  void decode_add(const std::byte* message, const Draw&, float factor,
                  std::span<float> values) const override {
    add_decoded(values, factor, [&](int64_t begin, int64_t count, float* out) {
      decode(message, begin, count, out);
    });
  }

 private:
  static void decode(const std::byte* message, int64_t begin, int64_t count, float* out) {
    int8_t levels[1024];
    unpack(at<uint8_t>(message, 4) + begin / 4, 2, levels, count);
    loops().from_int8(levels, *at<float>(message, 0), out, count);
  }
};

}  // namespace

Made terngrad(const std::string& parameter) {
  check_none("terngrad", parameter);
  return std::make_shared<TernGrad>();
}

}  // namespace usbyte::codecs
