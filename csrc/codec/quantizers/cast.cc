// SPDX-License-Identifier: Apache-2.0
#include "codec/make.h"
#include "codec/message.h"

namespace usbyte::codecs {
namespace {

class Cast final : public Codec {
 public:
  using To = void (*)(const float*, uint16_t*, int64_t);
  using From = void (*)(const uint16_t*, float*, int64_t);

  Cast(std::string spec, DType dtype, GroupCodec::Kind kind, To to, From from)
      : spec_(std::move(spec)), dtype_(dtype), kind_(kind), to_(to), from_(from) {}

  std::string spec() const override { return spec_; }
  bool adds() const override { return true; }
  DType message_dtype() const override { return dtype_; }
  int64_t message_bytes(int64_t count) const override { return 2 * count; }
  int state_rows() const override { return 0; }
  std::optional<GroupCodec> kernels() const override { return GroupCodec{kind_}; }

  void encode(std::span<const float> values, const RngKey&, std::byte* message) const override {
    to_(values.data(), at<uint16_t>(message, 0), std::ssize(values));
  }
  void decode(const std::byte* message, const RngKey&, std::span<float> values) const override {
    from_(at<uint16_t>(message, 0), values.data(), std::ssize(values));
  }
  void decode_add(const std::byte* message, const RngKey&, float factor,
                  std::span<float> values) const override {
    add_decoded(values, factor, [&](int64_t begin, int64_t count, float* out) {
      from_(at<uint16_t>(message, 2 * begin), out, count);
    });
  }

 private:
  const std::string spec_;
  const DType dtype_;
  const GroupCodec::Kind kind_;
  const To to_;
  const From from_;
};

}  // namespace

Made fp16(const std::string& parameter) {
  check_none("fp16", parameter);
  return std::make_shared<Cast>("fp16", DType::float16, GroupCodec::Kind::fp16, loops().to_fp16,
                                loops().from_fp16);
}

Made bf16(const std::string& parameter) {
  check_none("bf16", parameter);
  return std::make_shared<Cast>("bf16", DType::bfloat16, GroupCodec::Kind::bf16, loops().to_bf16,
                                loops().from_bf16);
}

}  // namespace usbyte::codecs
