// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "codec/make.h"
#include "levels.h"
#include "usbyte/error.h"

namespace usbyte::codecs {
namespace {

// QSGD with a fixed width instead of its code of varying length, so that messages have one size:
// levels of the norms of buckets. D. Alistarh et al., "QSGD: Communication-Efficient SGD via
// Gradient Quantization and Encoding", NeurIPS 2017.
class Qsgd final : public Levels {
 public:
  Qsgd(GroupCodec::Kind kind, int bits) : Levels(kind, 512, bits), bits_(bits) {}

  std::string spec() const override { return "qsgd:" + std::to_string(bits_); }

 private:
  float most_of(std::span<const float> values) const override {
    return static_cast<float>(std::sqrt(loops().sum_of_squares(values.data(), std::ssize(values))));
  }

  const int bits_;
};

}  // namespace

Made qsgd(const std::string& parameter) {
  using Kind = GroupCodec::Kind;
  if (parameter == "2") return std::make_shared<Qsgd>(Kind::qsgd2, 2);
  if (parameter == "4") return std::make_shared<Qsgd>(Kind::qsgd4, 4);
  if (parameter == "8") return std::make_shared<Qsgd>(Kind::qsgd8, 8);
  throw UsageError("codec 'qsgd" + (parameter.empty() ? "" : ":" + parameter) +
                   "': there are qsgd:2, qsgd:4 and qsgd:8, by the bits of an element");
}

}  // namespace usbyte::codecs
