// SPDX-License-Identifier: Apache-2.0
// What codecs remember between steps.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "codec_rig.h"
#include "usbyte/codec.h"

namespace usbyte {
namespace {

using test::decoded;
using test::kInfinity;
using test::kNan;
using test::norm;
using test::Random;

// One rank's codec state of a run, and what it sends.
struct Sender {
  Sender(const std::string& spec, size_t count)
      : codec(make_codec(spec)), rows{std::vector<float>(count), std::vector<float>(count)} {
    codec_state.rows = {rows[0].data(), rows[1].data()};
  }
  std::vector<float> send(const std::vector<float>& gradient, int64_t step, int ranks = 1) {
    const RngKey rng = RngKey::of(1, step, 0, 0);
    message.assign(static_cast<size_t>(codec->message_bytes(std::ssize(gradient))), std::byte{});
    codec->send(gradient, codec_state, rng, ranks, message.data());
    return decoded(*codec, message, gradient.size(), rng);
  }

  std::shared_ptr<const Codec> codec;
  std::vector<float> rows[2];
  CodecState codec_state;
  std::vector<std::byte> message;
};

std::vector<float> normal(Random& random, size_t count, float mean = 0.1F) {
  std::normal_distribution<float> drawn(mean, 1);
  std::vector<float> out(count);
  for (float& x : out) x = drawn(random.engine());
  return out;
}

class Feedback : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Codecs, Feedback,
                         testing::Values("fp8", "fp8:e5m2", "int8", "topk:0.01", "topk:0.3",
                                         "randk:0.1", "efsignsgd", "onebit", "dct:0.1",
                                         "dct:0.1,period=7", "dgc:0.1,momentum=0"),
                         [](const auto& of) {
                           std::string name = of.param;
                           for (char& c : name)
                             c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

// What has been sent and what is remembered are all that there was, and it does not pile up.
TEST_P(Feedback, LosesNothing) {
  Random random(12);
  constexpr size_t kCount = 700;
  Sender sender(GetParam(), kCount);
  std::vector<double> produced(kCount), sent(kCount);
  double early = 0, late = 0;
  for (int step = 0; step < 1200; ++step) {
    const std::vector<float> gradient = normal(random, kCount);
    const std::vector<float> part = sender.send(gradient, step);
    for (size_t i = 0; i < kCount; ++i) {
      produced[i] += gradient[i];
      sent[i] += part[i];
    }
    if (400 <= step && step < 800) early = std::max(early, norm(sender.rows[0]));
    if (800 <= step) late = std::max(late, norm(sender.rows[0]));
  }
  for (size_t i = 0; i < kCount; ++i) ASSERT_NEAR(sent[i] + sender.rows[0][i], produced[i], 0.05);
  EXPECT_LT(late, 1.3 * early) << GetParam();
}

// Whoever skips steps that are not finite skips one, in whatever blocks the gradient was sent.
TEST_P(Feedback, WhatIsNotFiniteIsSeenInItsStepAndNotRemembered) {
  for (float bad : {kNan, kInfinity, -kInfinity}) {
    for (size_t at = 0; at < 600; at += 7) {
      Random random(at);
      Sender sender(GetParam(), 600);
      for (int step = 0; step < 30; ++step) {
        std::vector<float> gradient = normal(random, 600);
        if (step == 20) gradient[at] = bad;
        const bool finite = std::isfinite(norm(sender.send(gradient, step)));
        ASSERT_EQ(finite, step != 20) << bad << " at " << at << " in step " << step;
        ASSERT_TRUE(std::isfinite(norm(sender.rows[0]) + norm(sender.rows[1]))) << step;
      }
    }
  }
}

TEST_P(Feedback, AStepWithNothingFiniteSpoilsNoOther) {
  for (float bad : {kNan, kInfinity, -kInfinity}) {
    Random random(3);
    Sender sender(GetParam(), 600);
    int spoilt = 0;
    for (int step = 0; step < 60; ++step) {
      std::vector<float> gradient = normal(random, 600);
      if (step == 20) std::ranges::fill(gradient, bad);
      spoilt += !std::isfinite(norm(sender.send(gradient, step)));
    }
    EXPECT_EQ(spoilt, 1) << bad;
    EXPECT_TRUE(std::isfinite(norm(sender.rows[0]) + norm(sender.rows[1]))) << bad;
  }
}

TEST(FeedbackOff, ForgetsWhatItDoesNotSend) {
  Sender with("topk:0.25", 4), without("topk:0.25,feedback=off", 4);
  EXPECT_EQ(without.codec->state_rows(), 0);
  const std::vector<float> gradient = {3, 2, 0, 0};
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(without.send(gradient, step), (std::vector<float>{3, 0, 0, 0}));
  }
  with.send(gradient, 0);
  EXPECT_EQ(with.send(gradient, 1), (std::vector<float>{0, 4, 0, 0}));
}

std::vector<size_t> largest_first(const std::vector<float>& values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(
      order, [&](size_t a, size_t b) { return std::abs(values[a]) > std::abs(values[b]); });
  return order;
}

// Small enough for every element to be in the sample.
TEST(Dgc, CorrectsMomentumAndForgetsItWhereItWasSent) {
  Random random(5);
  constexpr size_t kCount = 300, kKept = 30;
  Sender sender("dgc:0.1,momentum=0.8,clip=20", kCount);
  std::vector<float> velocity(kCount), unsent(kCount);
  for (int step = 0; step < 50; ++step) {
    const std::vector<float> gradient = normal(random, kCount, 0.5F);
    const double most = 20 / std::sqrt(4.0), size = norm(gradient);
    const auto scale = static_cast<float>(size > most ? most / size : 1);
    EXPECT_LT(scale, 1);  // the norm is about 19
    for (size_t i = 0; i < kCount; ++i) {
      velocity[i] = 0.8F * velocity[i] + scale * gradient[i];
      unsent[i] += velocity[i];
    }
    std::vector<float> want(kCount);
    const std::vector<size_t> order = largest_first(unsent);
    for (size_t k = 0; k < kKept; ++k) {
      want[order[k]] = std::exchange(unsent[order[k]], 0.0F);
      velocity[order[k]] = 0;
    }
    const std::vector<float> got = sender.send(gradient, step, 4);
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_NEAR(got[i], want[i], 1e-4) << step;
      ASSERT_NEAR(sender.rows[0][i], unsent[i], 1e-4);
      ASSERT_NEAR(sender.rows[1][i], velocity[i], 1e-4);
    }
  }
}

// Of many elements a sample finds about the share that was asked for, never more.
TEST(Dgc, ASampleFindsTheThreshold) {
  Random random(6);
  constexpr size_t kCount = 400000, kKept = 4000;
  Sender sender("dgc:0.01", kCount);
  for (int step = 0; step < 5; ++step) {
    const std::vector<float> got = sender.send(normal(random, kCount, 0), step);
    const auto sent =
        static_cast<size_t>(std::ranges::count_if(got, [](float x) { return x != 0; }));
    EXPECT_LE(sent, kKept);
    EXPECT_GT(sent, kKept / 2);
    float least = kInfinity, most = 0;
    for (size_t i = 0; i < kCount; ++i) {
      if (got[i] != 0) least = std::min(least, std::abs(got[i]));
      most = std::max(most, std::abs(sender.rows[0][i]));
    }
    EXPECT_LT(most, 1.15F * least) << "something larger was kept";
  }
}

TEST(Dgc, WarmsUpInFourStages) {
  const auto codec = make_codec("dgc:0.01,momentum=0.5,warmup=8");
  EXPECT_EQ(codec->at_step(0), "dgc:0.25,momentum=0.5");
  EXPECT_EQ(codec->at_step(1), "dgc:0.25,momentum=0.5");
  EXPECT_EQ(codec->at_step(2), "dgc:0.0625,momentum=0.5");
  EXPECT_EQ(codec->at_step(5), "dgc:0.015625,momentum=0.5");
  EXPECT_EQ(codec->at_step(6), "dgc:0.01,momentum=0.5");
  EXPECT_EQ(codec->at_step(8), "dgc:0.01,momentum=0.5");
  EXPECT_EQ(make_codec("topk:0.5")->at_step(0), "topk:0.5");
}

TEST(Dct, KeepsItsThresholdForAPeriod) {
  Random random(7);
  constexpr size_t kCount = 5000, kKept = 500;
  Sender sender("dct:0.1,period=5", kCount);
  float threshold = 0;
  for (int step = 0; step < 60; ++step) {
    std::vector<float> gradient = normal(random, kCount, 0);
    std::vector<float> all = sender.rows[0];
    for (size_t i = 0; i < kCount; ++i) all[i] += gradient[i];
    const std::vector<float> got = sender.send(gradient, step);
    if (step % 5 == 0) threshold = std::abs(all[largest_first(all)[kKept - 1]]);
    size_t above = 0, sent = 0;
    for (size_t i = 0; i < kCount; ++i) {
      above += std::abs(all[i]) >= threshold;
      sent += got[i] != 0;
      if (got[i] == 0) continue;
      ASSERT_GE(std::abs(got[i]), threshold) << step;
      ASSERT_EQ(got[i], all[i]);
    }
    ASSERT_EQ(sent, std::min(above, kKept)) << step;
  }
}

TEST(Dct, FindsAThresholdAnewWhenGradientsBecomeSmall) {
  Random random(8);
  Sender sender("dct:0.1,period=1000000", 2000);
  for (int step = 0; step < 40; ++step) {
    std::vector<float> gradient = normal(random, 2000, 0);
    if (step >= 20) std::fill(sender.rows[0].begin(), sender.rows[0].end(), 0.0F);
    for (float& x : gradient) x *= step < 20 ? 1.0F : 1e-3F;
    const std::vector<float> got = sender.send(gradient, step);
    const auto sent = std::ranges::count_if(got, [](float x) { return x != 0; });
    if (step != 20) {
      EXPECT_GT(sent, 50) << step;
    }
  }
}

TEST(Dct, SendsNoZerosInPlaceOfGradients) {
  Random random(9);
  Sender sender("dct:0.1", 1000);
  for (int step = 0; step < 20; ++step) {
    std::vector<float> gradient(1000);
    for (size_t i = 0; i < 50; ++i) gradient[i * 20] = normal(random, 1, 5)[0];
    const std::vector<float> got = sender.send(gradient, step);
    for (size_t i = 0; i < gradient.size(); ++i) {
      if (step == 0) {
        ASSERT_EQ(got[i], gradient[i]) << i;
      }
      ASSERT_LT(std::abs(sender.rows[0][i]), 20);
    }
  }
}

TEST(Dct, StartsWithZeros) {
  Sender sender("dct:0.5", 8);
  for (int step = 0; step < 3; ++step) sender.send(std::vector<float>(8, 0.0F), step);
  EXPECT_EQ(sender.send({1, 2, 3, 4, 5, 6, 7, 8}, 3), (std::vector<float>{0, 0, 0, 0, 5, 6, 7, 8}));
}

TEST(Signum, SendsTheSignsOfTheRunningMean) {
  Sender sender("signum:0.75", 3);
  EXPECT_EQ(sender.send({1, -1, 1}, 0), (std::vector<float>{1, -1, 1}));
  EXPECT_EQ(sender.rows[0], (std::vector<float>{0.25F, -0.25F, 0.25F}));
  EXPECT_EQ(sender.send({-0.5F, 2, 1}, 1), (std::vector<float>{1, 1, 1}));
  const std::vector<float> bad = sender.send({1, kNan, 1}, 2);
  EXPECT_TRUE(std::isnan(bad[0]));
  EXPECT_EQ(sender.send({1, 1, 1}, 3), (std::vector<float>{1, 1, 1}));
  EXPECT_EQ(sender.rows[0][1], 0.25F);
}

}  // namespace
}  // namespace usbyte
