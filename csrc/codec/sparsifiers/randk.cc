// SPDX-License-Identifier: Apache-2.0
#include <limits>

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
    draw(values, rng, message);
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
  void send(std::span<const float> gradient, CodecState& state, const RngKey& rng, int,
            std::byte* message) const override {
    const std::span<float> unsent(state.rows[0], gradient.size());
    loops().add(gradient.data(), 1, unsent.data(), std::ssize(unsent));
    const bool finite = draw(unsent, rng, message);
    decode_add(message, rng, -1, unsent);
    if (!finite) forget_what_is_not_finite(unsent);
  }

 private:
  // Returns whether all values are finite. If not, the first that is sent says so: all ranks must
  // see it in this step, as in a later one, when it is drawn, it would spoil that one too.
  bool draw(std::span<const float> values, const RngKey& rng, std::byte* message) const {
    float* const sent = at<float>(message, 0);
    for_each(rng, std::ssize(values), [&](int64_t i, size_t index) { sent[i] = values[index]; });
    if (loops().largest(values.data(), std::ssize(values)) < kInfinityBits) return true;
    sent[0] = std::numeric_limits<float>::quiet_NaN();
    return false;
  }
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
