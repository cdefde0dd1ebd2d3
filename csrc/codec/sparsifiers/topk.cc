// SPDX-License-Identifier: Apache-2.0
#include "codec/make.h"
#include "sparse.h"

namespace usbyte::codecs {
namespace {

class TopK final : public Sparse {
 public:
  using Sparse::Sparse;
  std::string spec() const override { return "topk:" + text_of(ratio()); }
};

}  // namespace

Made topk(const std::string& parameter) {
  return std::make_shared<TopK>(ratio_of("topk", parameter));
}

}  // namespace usbyte::codecs
