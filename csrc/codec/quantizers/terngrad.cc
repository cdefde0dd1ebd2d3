// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "codec/make.h"
#include "levels.h"

namespace usbyte::codecs {
namespace {

// -1, 0 or 1 times the largest magnitude. W. Wen et al., "TernGrad: Ternary Gradients to Reduce
// Communication in Distributed Deep Learning", NeurIPS 2017; for each group where the paper has it
// for each layer, as a plan's blocks span layers. Without its clipping, which is not unbiased.
class TernGrad final : public Levels {
 public:
  TernGrad() : Levels(GroupCodec::Kind::terngrad, kMostElements, 2) {}

  std::string spec() const override { return "terngrad"; }

 private:
  float most_of(std::span<const float> values) const override {
    return std::bit_cast<float>(loops().largest(values.data(), std::ssize(values)));
  }
};

}  // namespace

Made terngrad(const std::string& parameter) {
  check_none("terngrad", parameter);
  return std::make_shared<TernGrad>();
}

}  // namespace usbyte::codecs
