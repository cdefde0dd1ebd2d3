// SPDX-License-Identifier: Apache-2.0
#include "codec/make.h"
#include "codec/message.h"
#include "grouped.h"

namespace usbyte::codecs {
namespace {

// Signs times the mean magnitude. S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other
// Gradient Compression Schemes", ICML 2019; a mean for each group where the paper has one for each
// layer, as a plan's blocks span layers (and as S. Zheng, Z. Huang and J. T. Kwok, "Communication-
// Efficient Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019).
class EfSignSgd final : public Grouped {
 public:
  EfSignSgd() : Grouped(GroupCodec::Kind::efsignsgd, kMostElements, 1, 1) {}

  std::string spec() const override { return "efsignsgd"; }

 private:
  void encode_group(std::span<const float> values, uint64_t, float* mean,
                    uint8_t* packed) const override {
    const int64_t count = std::ssize(values);
    const double total = loops().sum_of_magnitudes(values.data(), count);
    *mean = static_cast<float>(total / static_cast<double>(count));
    loops().to_signs(values.data(), reinterpret_cast<uint32_t*>(packed), count);
  }
  void decode_group(const float* mean, const uint8_t* packed,
                    std::span<float> values) const override {
    loops().from_signs(reinterpret_cast<const uint32_t*>(packed), *mean, -*mean, values.data(),
                       std::ssize(values));
  }
};

}  // namespace

Made efsignsgd(const std::string& parameter) {
  check_none("efsignsgd", parameter);
  return std::make_shared<EfSignSgd>();
}

}  // namespace usbyte::codecs
