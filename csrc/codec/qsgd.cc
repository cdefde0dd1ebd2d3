#include <cmath>

#include "levels.h"
#include "make.h"
#include "usbyte/error.h"

namespace usbyte::codecs {
namespace {

// QSGD with a fixed width instead of its code of varying length, so that messages have one size:
// levels of the norms of buckets. D. Alistarh et al., "QSGD: Communication-Efficient SGD via
// Gradient Quantization and Encoding", NeurIPS 2017.
class Qsgd final : public Levels {
 public:
  explicit Qsgd(int bits) : Levels(512, bits), bits_(bits) {}

  std::string spec() const override { return "qsgd:" + std::to_string(bits_); }

 private:
  float most_of(std::span<const float> values) const override {
    return static_cast<float>(std::sqrt(loops().sum_of_squares(values.data(), std::ssize(values))));
  }

  const int bits_;
};

}  // namespace

Made qsgd(const std::string& parameter) {
  for (int bits : {2, 4, 8}) {
    if (parameter == std::to_string(bits)) return std::make_shared<Qsgd>(bits);
  }
  throw UsageError("codec 'qsgd" + (parameter.empty() ? "" : ":" + parameter) +
                   "': there are qsgd:2, qsgd:4 and qsgd:8, by the bits of an element");
}

}  // namespace usbyte::codecs
