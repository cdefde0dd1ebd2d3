#include <cmath>

#include "majority.h"
#include "make.h"

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
  int memories() const override { return 1; }
  std::string remembers() const override { return "mean"; }

  void send(std::span<const float> gradient, Memory& memory, const Draw& draw, int,
            std::byte* message) const override {
    const std::span<float> mean(memory.rows[0], gradient.size());
    const auto old = static_cast<float>(momentum_), fresh = static_cast<float>(1 - momentum_);
    for (size_t i = 0; i < mean.size(); ++i) mean[i] = old * mean[i] + fresh * gradient[i];
    encode(mean, draw, message);
    if (loops().largest(mean.data(), std::ssize(mean)) < kInfinityBits) return;
    for (float& x : mean) {
      if (!std::isfinite(x)) x = 0;  // all ranks see it now, and not in every step to come
    }
  }

  static constexpr double kMomentum = 0.9;

 private:
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
