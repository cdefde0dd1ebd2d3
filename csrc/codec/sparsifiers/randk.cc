// SPDX-License-Identifier: Apache-2.0
#include "codec/make.h"
#include "codec/message.h"
#include "permutation.h"

namespace usbyte::codecs {
namespace {

// The values of elements that every rank finds by itself.
class RandK final : public Codec {
 public:
  explicit RandK(double ratio) : ratio_(ratio) {}

  std::string spec() const override { return "randk:" + text_of(ratio_); }
  bool adds() const override { return true; }
  DType message_dtype() const override { return DType::float32; }
  int64_t message_bytes(int64_t count) const override { return 4 * kept(ratio_, count); }

  void encode(std::span<const float> values, const RngKey& rng, std::byte* message) const override {
    float* const sent = at<float>(message, 0);
    for_each(rng, std::ssize(values), [&](int64_t i, size_t index) { sent[i] = values[index]; });
  }
  void decode(const std::byte* message, const RngKey& rng, std::span<float> values) const override {
    std::fill(values.begin(), values.end(), 0.0F);
    const float* const sent = at<float>(message, 0);
    for_each(rng, std::ssize(values), [&](int64_t i, size_t index) { values[index] = sent[i]; });
  }
  void decode_add(const std::byte* message, const RngKey& rng, float factor,
                  std::span<float> values) const override {
    const float* const sent = at<float>(message, 0);
    for_each(rng, std::ssize(values),
             [&](int64_t i, size_t index) { values[index] += factor * sent[i]; });
  }

 private:
  template <typename Body>
  void for_each(const RngKey& rng, int64_t count, Body body) const {
    const Permutation permutation(rng.shared, static_cast<uint64_t>(count));
    const int64_t k = kept(ratio_, count);
    for (int64_t i = 0; i < k; ++i) body(i, permutation(static_cast<uint64_t>(i)));
  }

  const double ratio_;
};

}  // namespace

Made randk(const std::string& parameter) {
  return std::make_shared<RandK>(ratio_of("randk", parameter));
}

}  // namespace usbyte::codecs
