// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "../fuzz/parsers.h"
#include "ranks.h"

namespace usbyte::test {
namespace {

using nlohmann::ordered_json;

const std::string kPlan =
    R"({"format":"usbyte-plan-1","policy":"p","tensors":[{"name":"a","numel":4,"dtype":"float32"}],)"
    R"("ops":[{"kind":"all_reduce","window_bytes":8,"fence":false,"codec":"none","blocks":[[0,4]]}]})";

ordered_json plan() { return ordered_json::parse(kPlan); }

std::string refusal(const std::string& text) {
  return message_of<PlanError>([&] { Plan::from_json(text); });
}

std::string nested(int depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(Parsers, WhatTheFuzzerHasKeptStillHolds) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(USBYTE_CORPUS_DIR)) {
    std::ostringstream text;
    text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    EXPECT_NO_THROW(check_parser(text.str())) << entry.path();
    ++files;
  }
  EXPECT_GT(files, 10);
}

TEST(Parsers, TheCorpusHasValidTextsOfEveryKind) {
  std::string kinds;
  for (const auto& entry : std::filesystem::directory_iterator(USBYTE_CORPUS_DIR)) {
    std::ostringstream stream;
    stream << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    const std::string text = stream.str();
    if (text.empty() || !entry.path().filename().string().starts_with("valid")) continue;
    kinds += text[0];
    const std::string rest = text.substr(1);
    switch (text[0]) {
      case 'P':
        EXPECT_NO_THROW(Plan::from_json(rest)) << entry.path();
        break;
      case 'F':
        EXPECT_NO_THROW(Profile::from_json(rest)) << entry.path();
        break;
      case 'N':
        EXPECT_NO_THROW(NetworkModel::from_json(rest)) << entry.path();
        break;
      case 'T':
        EXPECT_NO_THROW(Topology::from_json(rest)) << entry.path();
        break;
      case 'M':
        EXPECT_NO_THROW(MeshSchedule::from_json(rest)) << entry.path();
        break;
      case 'C':
        EXPECT_NO_THROW(CodecCosts::from_json(rest)) << entry.path();
        break;
      default:
        FAIL() << entry.path();
    }
  }
  for (char kind : std::string("PFNTMC")) EXPECT_NE(kinds.find(kind), std::string::npos) << kind;
}

TEST(Parsers, NestingHasABound) {
  EXPECT_NE(refusal(nested(33)).find("more than 32 deep"), std::string::npos);
  EXPECT_EQ(refusal(nested(32)).find("deep"), std::string::npos);
  // Deep enough to end the stack of whoever recurses.
  EXPECT_NE(refusal(std::string(1 << 20, '[')).find("deep"), std::string::npos);
  ordered_json deep = plan();
  const std::string text = R"({"format":"usbyte-plan-1","route":)" + std::string(100000, '[');
  EXPECT_NE(refusal(text).find("deep"), std::string::npos);
}

TEST(Parsers, TextsHaveABound) {
  const std::string text = kPlan + std::string((64 << 20) + 1, ' ');
  EXPECT_NE(refusal(text).find("at most 67108864 are read"), std::string::npos);
  EXPECT_NE(message_of<UsageError>([&] { Topology::from_json(text); }).find("topology: a text of"),
            std::string::npos);
}

TEST(Parsers, NumbersThatDoNotFitAreErrors) {
  for (const char* number : {"1.5", "1e300", "9223372036854775808", "18446744073709551615", "\"4\"",
                             "null", "true", "[4]", "{}"}) {
    ordered_json text = plan();
    text["tensors"][0]["numel"] = ordered_json::parse(number);
    EXPECT_NE(refusal(text.dump()).find("is no whole number, or too large"), std::string::npos)
        << number;
    text = plan();
    text["ops"][0]["blocks"][0][1] = ordered_json::parse(number);
    EXPECT_NE(refusal(text.dump()).find("is no whole number, or too large"), std::string::npos)
        << number;
    text = plan();
    text["ops"][0]["dimension"] = ordered_json::parse(number);
    EXPECT_NE(refusal(text.dump()).find("dimension: "), std::string::npos) << number;
  }
  EXPECT_NE(refusal(kPlan.substr(0, 40) + "1e999").find("malformed JSON"), std::string::npos);
}

TEST(Parsers, ModelsLargerThanAnyAreErrors) {
  ordered_json text = plan();
  text["tensors"][0]["numel"] = int64_t{1} << 50;
  EXPECT_NE(refusal(text.dump()).find("are too many"), std::string::npos);
  text = plan();
  text["tensors"][0]["numel"] = int64_t{1} << 48;
  text["tensors"].push_back({{"name", "b"}, {"numel", 1}, {"dtype", "float32"}});
  EXPECT_NE(refusal(text.dump()).find("1 elements behind 281474976710656 are too many"),
            std::string::npos);
  text = plan();
  text["tensors"].push_back({{"name", "b"},
                             {"numel", 0},
                             {"dtype", "float32"},
                             {"rows", std::numeric_limits<int64_t>::max()},
                             {"width", 2}});
  EXPECT_NE(refusal(text.dump()).find("rows of 2 are too many"), std::string::npos);
  text["tensors"][1]["rows"] = -1;
  EXPECT_NE(refusal(text.dump()).find("a size is negative"), std::string::npos);
}

}  // namespace
}  // namespace usbyte::test
