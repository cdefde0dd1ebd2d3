// SPDX-License-Identifier: Apache-2.0
#include "usbyte/codec_costs.h"

#include <gtest/gtest.h>

#include "usbyte/error.h"

namespace usbyte {
namespace {

const CodecCosts kCosts{{{"fp16", {{1e-6, 1e-10, 1e-6}, {2e-6, 3e-10, 2e-6}}},
                         {"topk:0.01", {{1e-5, 2e-9, 1e-5}, {0, 1e-11, 0}, true, 2e-12}}}};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no error";
}

TEST(CodecCosts, JsonIsCanonicalAndLosesNothing) {
  EXPECT_EQ(CodecCosts::from_json(kCosts.to_json()), kCosts);
  EXPECT_EQ(CodecCosts::from_json(CodecCosts{}.to_json()), CodecCosts{});
  // Another spelling of the same spec.
  std::string other = kCosts.to_json();
  other.replace(other.find("topk:0.01"), 9, "topk:1e-2");
  EXPECT_EQ(CodecCosts::from_json(other).to_json(), kCosts.to_json());
}

TEST(CodecCosts, AreThoseOfTheSpecHoweverItIsSpelt) {
  EXPECT_EQ(kCosts.of("fp16"), kCosts.by_spec.at("fp16"));
  EXPECT_EQ(kCosts.of("topk:1e-2"), kCosts.by_spec.at("topk:0.01"));
  EXPECT_EQ(kCosts.of("none"), CodecCost{});
  EXPECT_EQ(CodecCosts{}.of("none"), CodecCost{});
}

TEST(CodecCosts, OfSeveralMessages) {
  const CodecCost one_by_one{{1, 0.1, 1}, {2, 0.1, 2}};
  const CodecCost at_once{{1, 0.1, 1}, {2, 0.1, 2}, true, 0.02};
  for (int64_t bytes : {0, 5, 30}) {
    EXPECT_EQ(one_by_one.encode_s(3, bytes), 3 * one_by_one.encode.time_s(bytes));
    EXPECT_EQ(one_by_one.decode_s(2, 4, bytes), 8 * one_by_one.decode.time_s(bytes));
    EXPECT_EQ(at_once.encode_s(3, bytes), at_once.encode.time_s(3 * bytes));
    EXPECT_EQ(at_once.decode_s(2, 1, bytes), at_once.decode.time_s(2 * bytes));
  }
  // 60 bytes are written, and three times as many are added.
  EXPECT_DOUBLE_EQ(at_once.decode_s(2, 4, 30), 60 * 0.1 + 3 * 60 * 0.02);
  EXPECT_EQ(at_once.decode_s(1, 4, 10), 2);
  for (const CodecCost& cost : {one_by_one, at_once}) {
    EXPECT_EQ(cost.encode_s(0, 5), 0);
    EXPECT_EQ(cost.decode_s(0, 5, 5), 0);
    EXPECT_EQ(cost.decode_s(5, 0, 5), 0);
  }
}

TEST(CodecCosts, WhatIsUnknownSaysHowToMeasureIt) {
  EXPECT_NE(
      error_of([] { kCosts.of("qsgd:4"); }).find("run usbyte probe --codecs qsgd:4,fp16,topk:0.01"),
      std::string::npos);
  EXPECT_NE(error_of([] { CodecCosts{}.of("int8"); }).find("run usbyte probe --codecs int8"),
            std::string::npos);
  EXPECT_NE(error_of([] { kCosts.of("zip"); }).find("'zip' is unknown"), std::string::npos);
}

TEST(CodecCosts, RefusesWhatIsNone) {
  const std::string good = kCosts.to_json();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string json = good;
    json.replace(json.find(from), from.size(), to);
    return error_of([&] { CodecCosts::from_json(json); });
  };
  EXPECT_EQ(with("fp16", "fp16"), "no error");
  EXPECT_NE(with("fp16", "fp17").find("'fp17' is unknown"), std::string::npos);
  EXPECT_NE(with("fp16", "none").find("free"), std::string::npos);
  EXPECT_NE(with("1e-06", "-1.0").find("fp16, encode: a cost is negative"), std::string::npos);
  EXPECT_NE(with("2e-12", "-2.0").find("further_s_per_byte: a cost is negative"),
            std::string::npos);
  EXPECT_NE(with("alpha_s", "alpha").find("malformed"), std::string::npos);
  EXPECT_NE(with("\"fp16\"", "\"topk:.01\"").find("two entries"), std::string::npos);
  EXPECT_NE(with("costs-1", "costs-2").find("unknown format"), std::string::npos);
  for (const char* json :
       {"", "[]", "{}", R"({"format": 1})", R"({"format": "usbyte-codec-costs-1"})",
        R"({"format": "usbyte-codec-costs-1", "codecs": [1]})"}) {
    EXPECT_THROW(CodecCosts::from_json(json), UsageError) << json;
  }
}

}  // namespace
}  // namespace usbyte
