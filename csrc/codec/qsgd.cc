#include <bit>
#include <cmath>
#include <limits>

#include "make.h"
#include "message.h"
#include "random.h"
#include "usbyte/error.h"

namespace usbyte::codecs {
namespace {

constexpr int64_t kBucket = 512;

// QSGD with a fixed width instead of its code of varying length, so that messages have one size:
// the buckets' norms, then the levels. D. Alistarh et al., "QSGD: Communication-Efficient SGD via
// Gradient Quantization and Encoding", NeurIPS 2017.
class Qsgd final : public Codec {
 public:
  explicit Qsgd(int bits) : bits_(bits), levels_((1 << (bits - 1)) - 1) {}

  std::string spec() const override { return "qsgd:" + std::to_string(bits_); }
  int64_t message_bytes(int64_t count) const override {
    return 4 * buckets(count) + round_up((count * bits_ + 7) / 8, 4);
  }

  void encode(std::span<const float> values, const Draw& draw, std::byte* message) const override {
    const int64_t size = std::ssize(values);
    float* const norms = at<float>(message, 0);
    uint8_t* const packed = at<uint8_t>(message, 4 * buckets(size));
    std::fill(packed, at<uint8_t>(message, message_bytes(size)), uint8_t{0});
    in_pieces<kBucket>(size, [&](int64_t begin, int64_t count) {
      const float* const in = values.data() + begin;
      auto norm = static_cast<float>(std::sqrt(loops().sum_of_squares(in, count)));
      if (!std::isfinite(norm)) norm = std::numeric_limits<float>::quiet_NaN();
      if (norm < kLeastScaled) norm = 0;
      norms[begin / kBucket] = norm;
      if (!(norm > 0)) return;
      int8_t levels[kBucket];
      const auto key = static_cast<uint32_t>(mix(draw.own + static_cast<uint64_t>(begin)));
      loops().to_levels(in, static_cast<float>(levels_) / norm, levels_, key, levels, count);
      pack(levels, bits_, packed + begin * bits_ / 8, count);
    });
  }

  void decode(const std::byte* message, const Draw&, std::span<float> values) const override {
    in_pieces<kBucket>(std::ssize(values), [&](int64_t begin, int64_t count) {
      decode(message, std::ssize(values), begin, count, values.data() + begin);
    });
  }
  void decode_add(const std::byte* message, const Draw&, float factor,
                  std::span<float> values) const override {
    in_pieces<kBucket>(std::ssize(values), [&](int64_t begin, int64_t count) {
      float decoded[kBucket];
      decode(message, std::ssize(values), begin, count, decoded);
      loops().add(decoded, factor, values.data() + begin, count);
    });
  }
  int memories() const override { return 0; }

 private:
  static int64_t buckets(int64_t count) { return (count + kBucket - 1) / kBucket; }
  void decode(const std::byte* message, int64_t size, int64_t begin, int64_t count,
              float* out) const {
    int8_t levels[kBucket];
    unpack(at<uint8_t>(message, 4 * buckets(size)) + begin * bits_ / 8, bits_, levels, count);
    const float norm = at<float>(message, 0)[begin / kBucket];
    loops().from_int8(levels, norm / static_cast<float>(levels_), out, count);
  }

  const int bits_, levels_;
};

}  // namespace

Made qsgd(const std::string& parameter) {
  for (int bits : {2, 4, 8}) {
    if (parameter == std::to_string(bits)) return std::make_shared<Qsgd>(bits);
  }
  throw UsageError("codec 'qsgd" + (parameter.empty() ? "" : ":" + parameter) +
                   "': there are qsgd:2, qsgd:4 and qsgd:8, by the bits of an element");
}

}  // namespace usbyte::codecs
