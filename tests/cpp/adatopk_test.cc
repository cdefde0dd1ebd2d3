// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>

#include "policy/transforms/adatopk.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using Ratios = std::vector<double>;
using Specs = std::vector<std::string>;

TEST(AdaTopK, TheSlowestIsCompressedHardest) {
  EXPECT_EQ(adatopk_ratios(Ratios{8, 4, 1, 0.25, 0}, 0.125), (Ratios{0.125, 0.25, 1, 1, 1}));
  EXPECT_EQ(adatopk_ratios(Ratios{8, 4, 1, 0}, 0.125, 0.5), (Ratios{0.125, 0.25, 0.5, 0.5}));
}

TEST(AdaTopK, NothingToTellApart) {
  EXPECT_EQ(adatopk_ratios(Ratios{}, 0.1), Ratios{});
  EXPECT_EQ(adatopk_ratios(Ratios{0, 0}, 0.1, 0.5), (Ratios{0.5, 0.5}));
  EXPECT_EQ(adatopk_ratios(Ratios{3, 3}, 0.1), (Ratios{0.1, 0.1}));
}

TEST(AdaTopK, Codecs) {
  const Specs specs = adatopk_codecs(Ratios{3, 1, 0.005, 0.001}, 0.001);
  EXPECT_EQ(specs, (Specs{"topk:0.001", "topk:0.003", "none", "none"}));
  EXPECT_EQ(make_codec(specs[1])->spec(), specs[1]);
  EXPECT_EQ(adatopk_codecs(Ratios{1e9, 1}, 1e-6).front(), make_codec("topk:1e-06")->spec());
}

TEST(AdaTopK, Errors) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(adatopk_ratios(Ratios{1}, 0), UsageError);
  EXPECT_THROW(adatopk_ratios(Ratios{1}, 0.5, 0.4), UsageError);
  EXPECT_THROW(adatopk_ratios(Ratios{1}, 0.5, 1.5), UsageError);
  EXPECT_THROW(adatopk_ratios(Ratios{-1}, 0.5), UsageError);
  EXPECT_THROW(adatopk_ratios(Ratios{kNan}, 0.5), UsageError);
}

}  // namespace
}  // namespace usbyte
