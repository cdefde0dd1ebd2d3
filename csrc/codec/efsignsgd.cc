#include "make.h"
#include "signs.h"

namespace usbyte::codecs {
namespace {

// S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
// ICML 2019.
class EfSignSgd final : public Signs {
 public:
  std::string spec() const override { return "efsignsgd"; }

 private:
  Meaning meaning_of(std::span<const float> values, const uint32_t*) const override {
    const double total = loops().sum_of_magnitudes(values.data(), std::ssize(values));
    const auto mean = static_cast<float>(total / static_cast<double>(values.size()));
    return {mean, -mean};
  }
};

}  // namespace

Made efsignsgd(const std::string& parameter) {
  check_none("efsignsgd", parameter);
  return std::make_shared<EfSignSgd>();
}

}  // namespace usbyte::codecs
