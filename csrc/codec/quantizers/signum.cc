// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "codec/make.h"
#include "majority.h"

namespace usbyte::codecs {
namespace {

// The signs of each rank's momentum: J. Bernstein et al., "signSGD with Majority Vote is
// Communication Efficient and Fault Tolerant", ICLR 2019. The optimizer is to have none.
class Signum final : public Majority {
 public:
  explicit Signum(double momentum) : momentum_(momentum) {}

  std::string spec() const override {
    return momentum_ == kMomentum ? "signum" : "signum:" + text_of(momentum_);
  }
  int state_rows() const override { return 1; }
  std::string remembers() const override { return "mean"; }
  std::optional<GroupCodec> kernels() const override {
    return GroupCodec{GroupCodec::Kind::majority, momentum_};
  }

  static constexpr double kMomentum = 0.9;

 private:
  void take_up(std::span<const float> gradient, std::span<float> mean) const override {
    const auto old = static_cast<float>(momentum_), fresh = static_cast<float>(1 - momentum_);
    for (size_t i = 0; i < mean.size(); ++i) mean[i] = old * mean[i] + fresh * gradient[i];
  }
  void keep_unsent(const float* one, const uint8_t*, std::span<float> mean) const override {
    if (finite(one)) return;
    for (float& x : mean) {
      if (!std::isfinite(x)) x = 0;  // all ranks see it now, and not in every step to come
    }
  }

  const double momentum_;
};

}  // namespace

Made signum(const std::string& parameter) {
  Parameters parameters("signum", parameter.empty() ? "" : "momentum=" + parameter);
  const double momentum = parameters.number("momentum", Signum::kMomentum, 0, 0.999999);
  parameters.check_all_read();
  return std::make_shared<Signum>(momentum);
}

}  // namespace usbyte::codecs
