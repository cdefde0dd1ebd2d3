#include "usbyte/network.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "usbyte/error.h"

namespace usbyte {
namespace {

double squared_error(const AlphaBeta& c, const std::vector<Sample>& samples) {
  double sum = 0;
  for (const Sample& s : samples)
    sum += (c.time_s(s.bytes) - s.seconds) * (c.time_s(s.bytes) - s.seconds);
  return sum;
}

TEST(FitAlphaBeta, FindsAnExactLine) {
  const AlphaBeta fit = fit_alpha_beta(
      std::vector<Sample>{{1000, 1e-3 + 1e-5}, {5000, 1e-3 + 5e-5}, {9000, 1e-3 + 9e-5}});
  EXPECT_NEAR(fit.alpha_s, 1e-3, 1e-12);
  EXPECT_NEAR(fit.beta_s_per_byte, 1e-8, 1e-16);
}

TEST(FitAlphaBeta, NoFeasibleLineIsBetter) {
  std::mt19937 rng(7);
  std::uniform_real_distribution<double> seconds(0, 1), step(-0.05, 0.05);
  std::uniform_int_distribution<int64_t> bytes(1, 100);
  for (int round = 0; round < 200; ++round) {
    std::vector<Sample> samples;
    for (int i = 0; i < 5; ++i) samples.push_back({bytes(rng), seconds(rng)});
    const AlphaBeta fit = fit_alpha_beta(samples);
    EXPECT_GE(fit.alpha_s, 0);
    EXPECT_GE(fit.beta_s_per_byte, 0);
    const double best = squared_error(fit, samples);
    for (int i = 0; i < 50; ++i) {
      const AlphaBeta other{std::max(fit.alpha_s + step(rng), 0.0),
                            std::max(fit.beta_s_per_byte + step(rng) / 50, 0.0)};
      EXPECT_GE(squared_error(other, samples), best - 1e-12);
    }
  }
}

TEST(FitAlphaBeta, OneSizeCountsAsBeta) {
  const AlphaBeta fit = fit_alpha_beta(std::vector<Sample>{{100, 1}, {100, 3}});
  EXPECT_EQ(fit.alpha_s, 0);
  EXPECT_NEAR(fit.time_s(100), 2, 1e-12);
}

TEST(FitAlphaBeta, NoSamplesIsAnError) {
  EXPECT_THROW(fit_alpha_beta(std::vector<Sample>{}), UsageError);
}

}  // namespace
}  // namespace usbyte
