// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "codec/make.h"
#include "codec/message.h"
#include "grouped.h"

namespace usbyte::codecs {
namespace {

// Signs that stand for the mean of what is not negative, and of the rest. F. Seide et al., "1-Bit
// Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
// DNNs", Interspeech 2014; two means for each group where the paper has them for each column.
class OneBit final : public Grouped {
 public:
  OneBit() : Grouped(GroupCodec::Kind::onebit, kMostElements, 2, 1) {}

  std::string spec() const override { return "onebit"; }

 private:
  void encode_group(std::span<const float> values, uint64_t, float* means,
                    uint8_t* packed) const override {
    const int64_t count = std::ssize(values);
    auto* const signs = reinterpret_cast<uint32_t*>(packed);
    loops().to_signs(values.data(), signs, count);
    int64_t negative = 0;
    for (int64_t w = 0; w < (count + 31) / 32; ++w) negative += std::popcount(signs[w]);
    const auto mean = [](double total, int64_t of) {
      return of == 0 ? 0.0F : static_cast<float>(total / static_cast<double>(of));
    };
    means[0] = mean(loops().sum_of_positive(values.data(), count), count - negative);
    means[1] = mean(loops().sum_of_negative(values.data(), count), negative);
  }
  void decode_group(const float* means, const uint8_t* packed,
                    std::span<float> values) const override {
    loops().from_signs(reinterpret_cast<const uint32_t*>(packed), means[0], means[1], values.data(),
                       std::ssize(values));
  }
};

}  // namespace

Made onebit(const std::string& parameter) {
  check_none("onebit", parameter);
  return std::make_shared<OneBit>();
}

}  // namespace usbyte::codecs
