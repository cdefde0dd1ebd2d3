#include <bit>

#include "make.h"
#include "signs.h"

namespace usbyte::codecs {
namespace {

// F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
// Distributed Training of Speech DNNs", Interspeech 2014; two means for each block of a plan where
// the paper has them for each column.
class OneBit final : public Signs {
 public:
  std::string spec() const override { return "onebit"; }

 private:
  Meaning meaning_of(std::span<const float> values, const uint32_t* signs) const override {
    const int64_t size = std::ssize(values);
    int64_t negative = 0;
    for (int64_t w = 0; w < (size + 31) / 32; ++w) negative += std::popcount(signs[w]);
    const double magnitudes = loops().sum_of_magnitudes(values.data(), size);
    const double sum = loops().sum(values.data(), size);
    const auto mean = [](double total, int64_t count) {
      return count == 0 ? 0.0F : static_cast<float>(total / static_cast<double>(count));
    };
    return {mean((sum + magnitudes) / 2, size - negative), mean((sum - magnitudes) / 2, negative)};
  }
};

}  // namespace

Made onebit(const std::string& parameter) {
  check_none("onebit", parameter);
  return std::make_shared<OneBit>();
}

}  // namespace usbyte::codecs
