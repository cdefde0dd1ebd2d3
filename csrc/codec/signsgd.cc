#include <limits>

#include "make.h"
#include "signs.h"

namespace usbyte::codecs {
namespace {

// J. Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018, with
// its majority vote.
class SignSgd final : public Signs {
 public:
  std::string spec() const override { return "signsgd"; }
  bool wants_feedback() const override { return false; }

  void combine(std::span<const std::byte* const> messages, const Draw& draw,
               std::span<float> values) const override {
    Codec::combine(messages, draw, values);
    for (float& x : values) {
      if (x != 0) x = x > 0 ? 1.0F : x < 0 ? -1.0F : x;  // else it is not a number
    }
  }

 private:
  Meaning meaning_of(std::span<const float> values, const uint32_t*) const override {
    if (loops().largest(values.data(), std::ssize(values)) >= kInfinityBits) {
      return {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN()};
    }
    return {1, -1};
  }
};

}  // namespace

Made signsgd(const std::string& parameter) {
  check_none("signsgd", parameter);
  return std::make_shared<SignSgd>();
}

}  // namespace usbyte::codecs
