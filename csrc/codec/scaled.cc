#include <bit>
#include <limits>

#include "make.h"
#include "message.h"
#include "usbyte/error.h"

namespace usbyte::codecs {
namespace {

constexpr int64_t kGroup = 256;

// One byte for each element, and a scale for each group: the scales, then the bytes.
class Scaled final : public Codec {
 public:
  using To = void (*)(const float*, float, uint8_t*, int64_t);
  using From = void (*)(const uint8_t*, float, float*, int64_t);

  Scaled(std::string spec, float largest, To to, From from)
      : spec_(std::move(spec)), largest_(largest), to_(to), from_(from) {}

  std::string spec() const override { return spec_; }
  int64_t message_bytes(int64_t count) const override {
    return 4 * groups(count) + round_up(count, 4);
  }

  void encode(std::span<const float> values, const Draw&, std::byte* message) const override {
    const int64_t size = std::ssize(values);
    float* const scales = at<float>(message, 0);
    uint8_t* const bytes = at<uint8_t>(message, 4 * groups(size));
    in_pieces<kGroup>(size, [&](int64_t begin, int64_t count) {
      const float* const in = values.data() + begin;
      const uint32_t bits = loops().largest(in, count);
      const float most = std::bit_cast<float>(bits);
      float scale = most / largest_, up = largest_ / most;
      if (bits >= kInfinityBits) {
        scale = std::numeric_limits<float>::quiet_NaN();
        up = 0;
      } else if (most < kLeastScaled) {
        scale = up = 0;
      }
      scales[begin / kGroup] = scale;
      if (bits >= kInfinityBits) {
        std::fill_n(bytes + begin, count, uint8_t{0});
      } else {
        to_(in, up, bytes + begin, count);
      }
    });
    std::fill(bytes + size, bytes + round_up(size, 4), uint8_t{0});
  }

  void decode(const std::byte* message, const Draw&, std::span<float> values) const override {
    in_pieces<kGroup>(std::ssize(values), [&](int64_t begin, int64_t count) {
      decode(message, std::ssize(values), begin, count, values.data() + begin);
    });
  }
  void decode_add(const std::byte* message, const Draw&, float factor,
                  std::span<float> values) const override {
    in_pieces<kGroup>(std::ssize(values), [&](int64_t begin, int64_t count) {
      float decoded[kGroup];
      decode(message, std::ssize(values), begin, count, decoded);
      loops().add(decoded, factor, values.data() + begin, count);
    });
  }

 private:
  static int64_t groups(int64_t count) { return (count + kGroup - 1) / kGroup; }
  void decode(const std::byte* message, int64_t size, int64_t begin, int64_t count,
              float* out) const {
    const float scale = at<float>(message, 0)[begin / kGroup];
    from_(at<uint8_t>(message, 4 * groups(size) + begin), scale, out, count);
  }

  const std::string spec_;
  const float largest_;  // that a byte can stand for
  const To to_;
  const From from_;
};

void to_int8(const float* in, float scale, uint8_t* out, int64_t count) {
  loops().to_int8(in, scale, reinterpret_cast<int8_t*>(out), count);
}

void from_int8(const uint8_t* in, float scale, float* out, int64_t count) {
  loops().from_int8(reinterpret_cast<const int8_t*>(in), scale, out, count);
}

}  // namespace

Made int8(const std::string& parameter) {
  check_none("int8", parameter);
  return std::make_shared<Scaled>("int8", 127.0F, to_int8, from_int8);
}

Made fp8(const std::string& parameter) {
  if (parameter == "e5m2") {
    return std::make_shared<Scaled>("fp8:e5m2", 57344.0F, loops().to_e5m2, loops().from_e5m2);
  }
  if (!parameter.empty() && parameter != "e4m3") {
    throw UsageError("codec 'fp8:" + parameter + "': there are fp8:e4m3 and fp8:e5m2");
  }
  return std::make_shared<Scaled>("fp8", 448.0F, loops().to_e4m3, loops().from_e4m3);
}

}  // namespace usbyte::codecs
