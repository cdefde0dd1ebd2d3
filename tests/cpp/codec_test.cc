// SPDX-License-Identifier: Apache-2.0
#include "usbyte/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "codec/random.h"
#include "codec/simd/loops.h"
#include "codec/sparsifiers/permutation.h"
#include "codec_rig.h"
#include "support/half.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::decoded;
using test::encoded;
using test::gradient;
using test::kInfinity;
using test::kNan;
using test::largest;
using test::norm;
using test::Random;
using test::through;

const std::vector<std::string> kSpecs = {"fp16",
                                         "bf16",
                                         "fp8",
                                         "fp8:e5m2",
                                         "int8",
                                         "topk:0.01",
                                         "topk:0.3",
                                         "topk:1",
                                         "randk:0.1",
                                         "randk:1",
                                         "qsgd:2",
                                         "qsgd:4",
                                         "qsgd:8",
                                         "terngrad",
                                         "signsgd",
                                         "efsignsgd",
                                         "onebit",
                                         "dct:0.05",
                                         "dct:0.1,period=7",
                                         "dgc:0.05",
                                         "dgc:0.1,momentum=0.5,clip=2",
                                         "signum",
                                         "signum:0.5",
                                         "powersgd:2",
                                         "int8,feedback=off",
                                         "topk:0.1,feedback=off"};

bool votes(const std::string& spec) { return spec.starts_with("sign"); }

class AnyCodec : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Codecs, AnyCodec, testing::ValuesIn(kSpecs), [](const auto& of) {
  std::string name = of.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

TEST_P(AnyCodec, IsSpelledAsItIsMade) { EXPECT_EQ(make_codec(GetParam())->spec(), GetParam()); }

TEST_P(AnyCodec, FollowsTheRulesForAnySize) {
  const auto codec = make_codec(GetParam());
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const int64_t count = round < 70 ? round : random(1, 5000);
    const std::vector<float> values = gradient(random, count);
    const RngKey rng = RngKey::of(7, round, 100, 0), other = RngKey::of(7, round, 100, 1);
    const std::vector<std::byte> message = encoded(*codec, values, rng);
    EXPECT_TRUE(codec->adds() || message.size() % 4 == 0);
    EXPECT_EQ(message, encoded(*codec, values, rng)) << "not deterministic";
    const std::vector<float> once = decoded(*codec, message, values.size(), rng);
    std::vector<float> sum = values;
    codec->decode_add(message.data(), rng, -1, sum);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(sum[i], values[i] - once[i]);
    // What all ranks mean together.
    const std::vector<std::byte> second = encoded(*codec, values, other);
    const std::vector<float> twice = decoded(*codec, second, values.size(), other);
    const std::vector<const std::byte*> messages = {message.data(), second.data()};
    std::vector<float> all(values.size(), 5.0F);
    codec->combine(messages, rng, all);
    if (votes(GetParam())) continue;
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(all[i], once[i] + twice[i]);
  }
}

TEST_P(AnyCodec, ZerosStayZeros) {
  if (votes(GetParam())) return;  // has no zero
  for (size_t count : {1, 5, 600}) {
    EXPECT_EQ(through(GetParam(), std::vector<float>(count, 0.0F)), std::vector<float>(count, 0));
  }
}

// A number that is none, or too large to be one, must be seen by whoever looks at the result.
TEST_P(AnyCodec, WhatIsNotFiniteStaysVisible) {
  if (GetParam().starts_with("randk")) return;  // below
  Random random(2);
  for (float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    for (int64_t count : {1, 3, 300, 3000}) {
      std::vector<float> values = gradient(random, count);
      const auto at = static_cast<size_t>(random(0, count - 1));
      values[at] = bad;
      EXPECT_FALSE(std::isfinite(through(GetParam(), values)[at])) << bad << " of " << count;
    }
  }
}

TEST(Codec, ARandomShareShowsWhatIsNotFinite) {
  for (float bad : {kNan, kInfinity, -kInfinity}) {
    std::vector<float> values(100, 1);
    values[17] = bad;
    for (int step = 0; step < 20; ++step) {
      const std::vector<float> got = through("randk:0.1", values, RngKey::of(1, step, 0, 0));
      EXPECT_TRUE(std::ranges::any_of(got, [](float x) { return !std::isfinite(x); })) << step;
    }
  }
}

TEST(Codec, SizesAreThoseOfTheFormats) {
  const auto bytes = [](const char* spec, int64_t count) {
    return make_codec(spec)->message_bytes(count);
  };
  EXPECT_EQ(bytes("fp16", 1001), 2002);
  EXPECT_EQ(bytes("int8", 1001), 4 * 4 + 1004);
  EXPECT_EQ(bytes("fp8", 256), 4 + 256);
  EXPECT_EQ(bytes("topk:0.01", 1000), 80);
  EXPECT_EQ(bytes("topk:0.01", 3), 8);
  EXPECT_EQ(bytes("randk:0.01", 1000), 40);
  EXPECT_EQ(bytes("qsgd:4", 1024), 8 + 512);
  EXPECT_EQ(bytes("qsgd:2", 13), 4 + 4);
  EXPECT_EQ(bytes("terngrad", 1025), 2 * 4 + 260);
  EXPECT_EQ(bytes("efsignsgd", 1024), 4 + 128);
  EXPECT_EQ(bytes("onebit", 1025), 2 * 8 + 132);
  EXPECT_EQ(bytes("signsgd", 1025), 2 * 4 + 132);
  for (const std::string& spec : kSpecs) EXPECT_EQ(make_codec(spec)->message_bytes(0), 0) << spec;
}

TEST(Codec, CastsAreIeeeRoundedToNearest) {
  Random random(3);
  std::vector<float> values;
  for (int i = 0; i < 20000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random(0, 0xffffffff))));
  }
  for (int64_t bits = 0; bits < 0x10000; ++bits) {  // every fp16, and its neighbours' middles
    const float x = to_float(Half{static_cast<uint16_t>(bits)});
    if (std::isnan(x)) continue;
    values.insert(values.end(), {x, std::nextafter(x, 1e9F), x * (1 + 0x1p-11F)});
  }
  for (float x : {65504.0F, 65519.9F, 65520.0F, 1e-8F, 5.96e-8F, 6.1e-5F}) values.push_back(x);
  const std::vector<float> fp16 = through("fp16", values), bf16 = through("bf16", values);
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(fp16[i]) && std::isnan(bf16[i]));
      continue;
    }
    ASSERT_EQ(fp16[i], to_float(from_float<Half>(values[i]))) << values[i];
    ASSERT_EQ(bf16[i], to_float(from_float<BFloat16>(values[i]))) << values[i];
  }
}

TEST(Codec, Int8IsWithinHalfAStepOfItsGroup) {
  Random random(4);
  const std::vector<float> values = gradient(random, 5000), back = through("int8", values);
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t begin = i / 256 * 256, count = std::min<size_t>(256, values.size() - begin);
    const double step = largest(values.data() + begin, count) / 127;
    ASSERT_LE(std::abs(double{back[i]} - values[i]), step / 2 * (1 + 1e-5));
  }
}

TEST(Codec, Fp8IsWithinHalfALastPlace) {
  const struct {
    const char* spec;
    int mantissa, least;
    double most;
  } formats[] = {{"fp8", 3, -6, 448}, {"fp8:e5m2", 2, -14, 57344}};
  for (const auto& f : formats) {
    // With 1 as the group's scale every number of the format comes back as it is.
    std::vector<float> all{static_cast<float>(f.most)};
    for (int exponent = f.least; exponent <= 20; ++exponent) {
      for (int m = 0; m < 1 << f.mantissa; ++m) {
        const double x = std::ldexp(1 + std::ldexp(m, -f.mantissa), exponent);
        if (x <= f.most && all.size() < 254) all.push_back(static_cast<float>(x));
      }
    }
    for (int m = 0; m < 1 << f.mantissa; ++m) {
      if (all.size() < 256) all.push_back(static_cast<float>(-std::ldexp(m, f.least - f.mantissa)));
    }
    EXPECT_EQ(through(f.spec, all), all) << f.spec;
    Random random(5);
    const std::vector<float> values = gradient(random, 5000), back = through(f.spec, values);
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t begin = i / 256 * 256, count = std::min<size_t>(256, values.size() - begin);
      const double scale = largest(values.data() + begin, count) / f.most;
      const double subnormal = std::ldexp(scale, f.least - f.mantissa - 1);
      const double normal = std::ldexp(std::abs(double{values[i]}), -f.mantissa - 1);
      ASSERT_LE(std::abs(double{back[i]} - values[i]), std::max(normal, subnormal) * (1 + 1e-5));
    }
  }
}

TEST(Codec, TopKKeepsTheLargestTheFirstAmongEquals) {
  Random random(6);
  for (int round = 0; round < 200; ++round) {
    const int64_t count = random(1, 4000);
    std::vector<float> values = gradient(random, count);
    if (random.one_in(5)) std::fill(values.begin(), values.end(), 0.5F);
    if (random.one_in(5)) values[static_cast<size_t>(random(0, count - 1))] = kNan;
    for (double ratio : {0.001, 0.03, 0.5, 1.0}) {
      std::vector<size_t> order(values.size());
      std::iota(order.begin(), order.end(), size_t{0});
      const auto size_of = [&](size_t i) {
        return std::bit_cast<uint32_t>(values[i]) & 0x7fffffff;
      };
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return size_of(a) > size_of(b); });
      const auto k = std::max<long>(std::lround(ratio * static_cast<double>(count)), 1);
      std::vector<float> want(values.size());
      for (long i = 0; i < k; ++i)
        want[order[static_cast<size_t>(i)]] = values[order[static_cast<size_t>(i)]];
      char spec[32];
      std::snprintf(spec, sizeof spec, "topk:%g", ratio);
      const std::vector<float> got = through(spec, values);
      ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * 4), 0)
          << spec << " of " << count;
    }
  }
}

TEST(Codec, AnIndexThatThereIsNotIsAnError) {
  for (const char* spec : {"topk:0.5", "dct:0.5", "dgc:0.5"}) {
    const auto codec = make_codec(spec);
    std::vector<float> values(8, 1);
    std::vector<std::byte> message(static_cast<size_t>(codec->message_bytes(8)), std::byte{1});
    EXPECT_THROW(codec->decode(message.data(), {}, values), FaultError) << spec;
    EXPECT_THROW(codec->decode_add(message.data(), {}, 1, values), FaultError) << spec;
    std::vector<int64_t> ids;
    EXPECT_THROW(codec->selection()->read(message.data(), 8, 0, ids, values), FaultError) << spec;
  }
}

TEST(Codec, WhatIsPickedIsWhatIsDecoded) {
  for (const std::string name : {"topk:0.3", "topk:0.3,feedback=off", "dct:0.3", "dgc:0.3"}) {
    const auto codec = make_codec(name);
    ASSERT_TRUE(codec->selection()) << name;
    std::vector<float> gradient(20), rows(40), decoded(20), read(20);
    for (size_t i = 0; i < 4; ++i) gradient[5 * i] = 1 + static_cast<float>(i);
    CodecState state{{rows.data(), rows.data() + 20}, 0};
    std::vector<std::byte> message(static_cast<size_t>(codec->message_bytes(20)));
    codec->send(gradient, state, {}, 1, message.data());
    codec->decode(message.data(), {}, decoded);
    std::vector<int64_t> ids;
    std::vector<float> values;
    EXPECT_EQ(codec->selection()->selected_count(20), 6);
    codec->selection()->read(message.data(), 20, 100, ids, values);
    EXPECT_EQ(ids.size(), 4U) << name;  // neither zeros nor what stands for nothing
    for (size_t i = 0; i < ids.size(); ++i) read[static_cast<size_t>(ids[i] - 100)] = values[i];
    EXPECT_EQ(read, decoded) << name;
  }
  for (const char* name : {"randk:0.3", "int8", "fp16", "powersgd:1"}) {
    EXPECT_FALSE(make_codec(name)->selection()) << name;
  }
}

TEST(Codec, RanksDrawTheSameShareAndStepsOthers) {
  std::vector<float> ones(1000, 1);
  std::vector<int> sent(1000);
  for (int step = 0; step < 400; ++step) {
    const RngKey rng = RngKey::of(9, step, 4096, 0), elsewhere = RngKey::of(9, step, 4096, 5);
    const std::vector<float> got = through("randk:0.05", ones, rng);
    EXPECT_EQ(got, through("randk:0.05", ones, elsewhere));
    EXPECT_EQ(std::count(got.begin(), got.end(), 1.0F), 50);
    EXPECT_EQ(std::count(got.begin(), got.end(), 0.0F), 950);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] += got[i] == 1;
  }
  // Each is sent 20 times of 400 with a deviation of 4.4.
  EXPECT_GT(*std::min_element(sent.begin(), sent.end()), 1);
  EXPECT_LT(*std::max_element(sent.begin(), sent.end()), 45);
}

TEST(Codec, APermutationIsOne) {
  for (uint64_t size : {1, 2, 3, 5, 64, 1000, 4097}) {
    for (uint64_t key = 0; key < 5; ++key) {
      const Permutation permutation(key, size);
      std::set<uint64_t> seen;
      for (uint64_t i = 0; i < size; ++i) seen.insert(permutation(i));
      EXPECT_EQ(seen.size(), size);
      EXPECT_LT(*seen.rbegin(), size);
    }
  }
}

TEST(Codec, APermutationOfMoreThanFourBillionStaysInside) {
  const uint64_t size = (uint64_t{1} << 40) - 12345;
  const Permutation permutation(7, size);
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < 1000; ++i) seen.insert(permutation(i * (size / 1000)));
  EXPECT_EQ(seen.size(), 1000);
  EXPECT_LT(*seen.rbegin(), size);
}

// The mean over many draws is the value, within five deviations of that mean.
void expect_unbiased(const std::string& spec, double (*step_of)(const std::vector<float>&)) {
  Random random(8);
  const std::vector<float> values = gradient(random, 300);
  constexpr int kDraws = 4000;
  std::vector<double> total(values.size());
  for (int i = 0; i < kDraws; ++i) {
    const std::vector<float> got = through(spec, values, RngKey::of(3, i, 0, 2));
    for (size_t k = 0; k < got.size(); ++k) {
      total[k] += got[k];
      ASSERT_LE(std::abs(double{got[k]} - values[k]), step_of(values) * (1 + 1e-5));
    }
  }
  const double deviation = step_of(values) / 2 / std::sqrt(double{kDraws});
  for (size_t k = 0; k < values.size(); ++k) {
    EXPECT_NEAR(total[k] / kDraws, values[k], 5 * deviation) << spec << " " << k;
  }
}

TEST(Codec, StochasticRoundingIsUnbiasedAndWithinAStep) {
  expect_unbiased("qsgd:2", [](const std::vector<float>& v) { return norm(v); });
  expect_unbiased("qsgd:4", [](const std::vector<float>& v) { return norm(v) / 7; });
  expect_unbiased("qsgd:8", [](const std::vector<float>& v) { return norm(v) / 127; });
  expect_unbiased("terngrad",
                  [](const std::vector<float>& v) { return largest(v.data(), v.size()); });
}

TEST(Codec, RanksRoundByChanceOfTheirOwn) {
  std::vector<float> values(2000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7) - 3;
  for (const char* spec : {"qsgd:2", "qsgd:4", "terngrad"}) {
    const std::vector<float> first = through(spec, values, RngKey::of(1, 1, 0, 0));
    EXPECT_NE(first, through(spec, values, RngKey::of(1, 1, 0, 1))) << spec;
    EXPECT_NE(first, through(spec, values, RngKey::of(1, 2, 0, 0))) << spec;
    EXPECT_NE(first, through(spec, values, RngKey::of(2, 1, 0, 0))) << spec;
  }
}

TEST(Codec, SignsStandForTheMeansOfTheirGroup) {
  Random random(10);
  for (int64_t count : {1, 31, 32, 33, 1000, 1024, 1025, 5001}) {
    const std::vector<float> values = gradient(random, count);
    const std::vector<float> ef = through("efsignsgd", values), one = through("onebit", values);
    for (size_t begin = 0; begin < values.size(); begin += 1024) {
      const size_t end = std::min(begin + 1024, values.size());
      double magnitudes = 0, sums[2] = {};
      int64_t counts[2] = {};
      for (size_t i = begin; i < end; ++i) {
        magnitudes += std::abs(double{values[i]});
        sums[std::signbit(values[i])] += values[i];
        ++counts[std::signbit(values[i])];
      }
      const double mean = magnitudes / static_cast<double>(end - begin);
      for (size_t i = begin; i < end; ++i) {
        const bool negative = std::signbit(values[i]);
        ASSERT_NEAR(ef[i], negative ? -mean : mean, mean * 1e-6);
        ASSERT_NEAR(one[i], sums[negative] / static_cast<double>(counts[negative]), mean * 1e-6);
      }
    }
  }
}

TEST(Codec, GroupsDoNotKnowEachOther) {
  Random random(13);
  std::vector<float> first = gradient(random, 1024), second = gradient(random, 700);
  for (float& x : first) x *= 1e6F;
  std::vector<float> both = first;
  both.insert(both.end(), second.begin(), second.end());
  for (const char* spec : {"fp8", "fp8:e5m2", "int8", "efsignsgd", "onebit"}) {
    std::vector<float> want = through(spec, first);
    const std::vector<float> rest = through(spec, second);
    want.insert(want.end(), rest.begin(), rest.end());
    EXPECT_EQ(through(spec, both), want) << spec;
  }
  for (const char* spec : {"qsgd:2", "terngrad"}) {
    const std::vector<float> got = through(spec, both);
    const double most = spec[0] == 't' ? largest(second.data(), second.size()) : norm(second);
    EXPECT_LE(largest(got.data() + 1024, second.size()), most * (1 + 1e-6)) << spec;
  }
}

TEST(Codec, TheMajorityOfSignsWins) {
  Random random(11);
  const auto codec = make_codec("signsgd");
  for (int ranks : {1, 2, 3, 4, 7}) {
    std::vector<std::vector<std::byte>> messages;
    std::vector<double> votes(500);
    for (int r = 0; r < ranks; ++r) {
      const std::vector<float> values = gradient(random, 500);
      messages.push_back(encoded(*codec, values, RngKey::of(1, 1, 0, r)));
      const std::vector<float> own = decoded(*codec, messages.back(), values.size());
      for (size_t i = 0; i < votes.size(); ++i) {
        votes[i] += own[i];
        ASSERT_EQ(std::abs(own[i]), 1);
        if (values[i] != 0) {
          ASSERT_EQ(own[i] < 0, values[i] < 0);
        }
      }
    }
    std::vector<const std::byte*> all;
    for (const auto& message : messages) all.push_back(message.data());
    std::vector<float> got(votes.size());
    codec->combine(all, {}, got);
    for (size_t i = 0; i < votes.size(); ++i) {
      ASSERT_EQ(got[i], votes[i] > 0 ? 1 : votes[i] < 0 ? -1 : 0);
    }
  }
}

TEST(Codec, WhoHasNoOpinionDoesNotPush) {
  const std::vector<float> values = {0, -0.0F, 0, 0, 0, 1, -1};
  double votes[7] = {};
  for (int step = 0; step < 1000; ++step) {
    const std::vector<float> got = through("signsgd", values, RngKey::of(1, step, 0, 0));
    for (size_t i = 0; i < values.size(); ++i) votes[i] += got[i];
  }
  for (size_t i = 0; i < 5; ++i) EXPECT_LT(std::abs(votes[i]), 150) << i;
  EXPECT_EQ(votes[5], 1000);
  EXPECT_EQ(votes[6], -1000);
}

// Any processor does the same, but for sums, whose rounding only their sender sees.
TEST(Codec, LoopsForEveryProcessorAreThoseForThisOne) {
  const Loops &mine = loops(), &any = baseline_loops();
  Random random(13);
  for (int round = 0; round < 200; ++round) {
    const int64_t count = random(0, 300);
    const auto size = static_cast<size_t>(count);
    const std::vector<float> in = gradient(random, count);
    const auto same = [&](auto member, auto result, auto... scale) {
      std::vector<decltype(result)> a(size + 1), b(size + 1);
      (mine.*member)(in.data(), scale..., a.data(), count);
      (any.*member)(in.data(), scale..., b.data(), count);
      EXPECT_EQ(a, b);
      return a;
    };
    const auto back = [&](auto member, const auto& from, auto... scale) {
      std::vector<float> a(size), b(size);
      (mine.*member)(from.data(), scale..., a.data(), count);
      (any.*member)(from.data(), scale..., b.data(), count);
      EXPECT_EQ(a, b);
    };
    const double most = largest(in.data(), size);
    const float up = most > 0 ? static_cast<float>(1 / most) : 1;
    back(&Loops::from_fp16, same(&Loops::to_fp16, uint16_t{}));
    back(&Loops::from_bf16, same(&Loops::to_bf16, uint16_t{}));
    back(&Loops::from_int8, same(&Loops::to_int8, int8_t{}, 127 * up), 0.3F);
    back(&Loops::from_e4m3, same(&Loops::to_e4m3, uint8_t{}, 448 * up), 0.3F);
    back(&Loops::from_e5m2, same(&Loops::to_e5m2, uint8_t{}, 57344 * up), 0.3F);
    back(&Loops::from_signs, same(&Loops::to_signs, uint32_t{}), 0.3F, -0.7F);
    EXPECT_EQ(mine.largest(in.data(), count), any.largest(in.data(), count));
    std::vector<int8_t> a(size), b(size);
    mine.to_levels(in.data(), 7 * up, 7, 99, a.data(), count);
    any.to_levels(in.data(), 7 * up, 7, 99, b.data(), count);
    EXPECT_EQ(a, b);
    std::vector<uint32_t> c(size), d(size);
    const uint32_t least = std::bit_cast<uint32_t>(0.25F);
    EXPECT_EQ(mine.at_least(in.data(), least, 5, c.data(), count),
              any.at_least(in.data(), least, 5, d.data(), count));
    EXPECT_EQ(c, d);
    EXPECT_NEAR(mine.dot(in.data(), in.data(), count), any.sum_of_squares(in.data(), count),
                1e-12 * any.sum_of_squares(in.data(), count));
    std::vector<float> sum = in, other = in;
    mine.add(in.data(), 0.3F, sum.data(), count);
    any.add(in.data(), 0.3F, other.data(), count);
    EXPECT_EQ(sum, other);
  }
}

std::string problem(const std::string& spec) {
  try {
    make_codec(spec);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

TEST(Codec, WhatCannotBeMadeIsAnErrorThatNamesWhatCan) {
  EXPECT_EQ(make_codec("none"), nullptr);
  EXPECT_NE(problem("zip").find("'zip' is unknown; there are none, fp16"), std::string::npos);
  EXPECT_NE(problem("topk").find("topk:0.01"), std::string::npos);
  EXPECT_NE(problem("topk:").find("unknown"), std::string::npos);
  for (const char* ratio : {"0", "-1", "1.5", "nan", "x", "0.1x"}) {
    EXPECT_NE(problem(std::string("randk:") + ratio).find("above 0"), std::string::npos) << ratio;
  }
  EXPECT_NE(problem("fp16:3").find("no parameter"), std::string::npos);
  EXPECT_NE(problem("fp8:e3m4").find("fp8:e5m2"), std::string::npos);
  EXPECT_NE(problem("qsgd:3").find("qsgd:4"), std::string::npos);
  EXPECT_NE(problem("powersgd:0").find("rank=0 is not a number from 1 to 256"), std::string::npos);
  EXPECT_NE(problem("dgc:0.1,momentum=2").find("momentum=2 is not a number from 0"),
            std::string::npos);
  EXPECT_NE(problem("powersgd:4,foo=1").find("no parameter 'foo'"), std::string::npos);
  EXPECT_NE(problem("signum:0.9,foo=1").find("no parameter 'foo'"), std::string::npos);
  EXPECT_NE(problem("dgc:0.1,period=2").find("no parameter 'period'"), std::string::npos);
  EXPECT_NE(problem("dct:0.1,1000").find("cannot read '1000'"), std::string::npos);
  EXPECT_NE(problem("dct:0.1,period=1,period=2").find("cannot read"), std::string::npos);
  EXPECT_NE(problem("fp16,feedback=off").find("has no feedback"), std::string::npos);
  EXPECT_NE(problem("dct:0.1,feedback=off").find("has no feedback"), std::string::npos);
  for (const std::string& name : codec_names()) {
    EXPECT_EQ(problem(name).find("unknown"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace usbyte
