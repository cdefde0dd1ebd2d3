// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <limits>

#include "codec/make.h"
#include "codec/message.h"
#include "grouped.h"
#include "usbyte/error.h"

namespace usbyte::codecs {
namespace {

// One byte for each element, and a scale.
class Scaled final : public Grouped {
 public:
  using To = void (*)(const float*, float, uint8_t*, int64_t);
  using From = void (*)(const uint8_t*, float, float*, int64_t);

  Scaled(std::string spec, GroupCodec::Kind kind, float largest, To to, From from)
      : Grouped(kind, 256, 1, 8), spec_(std::move(spec)), largest_(largest), to_(to), from_(from) {}

  std::string spec() const override { return spec_; }

 private:
  void encode_group(std::span<const float> values, uint64_t, float* scale,
                    uint8_t* bytes) const override {
    const uint32_t bits = loops().largest(values.data(), std::ssize(values));
    const float most = std::bit_cast<float>(bits);
    if (bits >= kInfinityBits) {
      *scale = std::numeric_limits<float>::quiet_NaN();
      std::fill_n(bytes, values.size(), uint8_t{0});
    } else {
      const bool counts = most >= kLeastScaled;
      *scale = counts ? most / largest_ : 0;
      to_(values.data(), counts ? largest_ / most : 0, bytes, std::ssize(values));
    }
  }
  void decode_group(const float* scale, const uint8_t* bytes,
                    std::span<float> values) const override {
    from_(bytes, *scale, values.data(), std::ssize(values));
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
  return std::make_shared<Scaled>("int8", GroupCodec::Kind::int8, 127.0F, to_int8, from_int8);
}

Made fp8(const std::string& parameter) {
  if (parameter == "e5m2") {
    return std::make_shared<Scaled>("fp8:e5m2", GroupCodec::Kind::e5m2, 57344.0F, loops().to_e5m2,
                                    loops().from_e5m2);
  }
  if (!parameter.empty() && parameter != "e4m3") {
    throw UsageError("codec 'fp8:" + parameter + "': there are fp8:e4m3 and fp8:e5m2");
  }
  return std::make_shared<Scaled>("fp8", GroupCodec::Kind::e4m3, 448.0F, loops().to_e4m3,
                                  loops().from_e4m3);
}

}  // namespace usbyte::codecs
