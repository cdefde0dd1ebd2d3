// SPDX-License-Identifier: Apache-2.0
#include "codec/make.h"
#include "majority.h"

namespace usbyte::codecs {
namespace {

// J. Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018, with
// its majority vote.
class SignSgd final : public Majority {
 public:
  std::string spec() const override { return "signsgd"; }
  int state_rows() const override { return 0; }
};

}  // namespace

Made signsgd(const std::string& parameter) {
  check_none("signsgd", parameter);
  return std::make_shared<SignSgd>();
}

}  // namespace usbyte::codecs
