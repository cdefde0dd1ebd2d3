#include "usbyte/codec_probe.h"

#include <gtest/gtest.h>

#include <cmath>

#include "random_job.h"
#include "usbyte/codec.h"
#include "usbyte/emulated_cuda.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

std::vector<Sample> samples_of(const AlphaBeta& cost, double noise, std::mt19937& rng) {
  std::vector<Sample> out;
  for (int64_t bytes = 256; bytes <= 4 << 20; bytes *= 4) {
    for (int i = 0; i < 5; ++i) {
      out.push_back({bytes, cost.time_s(bytes) * (1 + uniform_real(rng, -noise, noise))});
    }
  }
  return out;
}

double mean_error(const AlphaBeta& cost, const std::vector<Sample>& points) {
  double sum = 0;
  for (const Sample& p : points) sum += std::abs(cost.time_s(p.bytes) / p.seconds - 1);
  return sum;
}

TEST(FitCodecCost, FindsConstantAndSlope) {
  std::mt19937 rng(1);
  for (int i = 0; i < 100; ++i) {
    const double alpha = std::exp(uniform_real(rng, std::log(1e-7), std::log(1e-3)));
    const double beta = std::exp(uniform_real(rng, std::log(1e-9), std::log(1e-7)));
    const AlphaBeta truth{alpha, beta, alpha};
    const Fit exact = fit_codec_cost(samples_of(truth, 0, rng));
    EXPECT_EQ(exact.cost.overlap_s, exact.cost.alpha_s);
    EXPECT_LT(exact.residual, 1e-12);
    for (int64_t bytes = 256; bytes <= 4 << 20; bytes *= 4) {
      EXPECT_NEAR(exact.cost.time_s(bytes) / truth.time_s(bytes), 1, 1e-12);
    }
    const Fit noisy = fit_codec_cost(samples_of(truth, 0.1, rng));
    EXPECT_LT(noisy.residual, 0.1);
    EXPECT_NEAR(noisy.cost.time_s(1 << 22) / truth.time_s(1 << 22), 1, 0.1);
  }
}

TEST(FitCodecCost, NoOtherIsNearer) {
  std::mt19937 rng(2);
  for (int i = 0; i < 30; ++i) {
    std::vector<Sample> points;
    for (int64_t bytes = 16; bytes <= 4096; bytes *= 4) {
      points.push_back({bytes, uniform_real(rng, 1, 9)});
    }
    const double least = mean_error(fit_codec_cost(points).cost, points);
    for (int k = 0; k < 5000; ++k) {
      const double alpha = uniform_real(rng, 0, 10), beta = uniform_real(rng, 0, 0.1);
      ASSERT_GE(mean_error({alpha, beta, alpha}, points), least - 1e-12);
    }
  }
}

TEST(FitCodecCost, RefusesWhatIsNoMeasurement) {
  EXPECT_THROW(fit_codec_cost({}), UsageError);
  for (const Sample& bad : {Sample{0, 1}, Sample{1, 0}, Sample{1, std::nan("")}}) {
    EXPECT_THROW(fit_codec_cost(std::vector<Sample>{bad}), UsageError);
  }
  EXPECT_EQ(fit_codec_cost(std::vector<Sample>{{10, 5.0}}).cost.time_s(10), 5.0);
}

TEST(MeasureCodec, EveryCodecOnALittleTime) {
  for (const char* spec : {"fp16", "bf16", "fp8", "int8", "topk:1e-2", "randk:0.01", "qsgd:4",
                           "terngrad", "signsgd", "efsignsgd", "onebit"}) {
    const MeasuredCodec measured = measure_codec(spec, 0.002);
    const auto codec = make_codec(spec);
    EXPECT_EQ(measured.spec, codec->spec());
    EXPECT_EQ(measured.message_bytes, codec->message_bytes(measured.largest_bytes / 4));
    EXPECT_GE(measured.largest_bytes, 256 * 4 * 4);
    for (const auto* samples : {&measured.encode, &measured.decode}) {
      EXPECT_GE(samples->size(), 9);
      for (const Sample& s : *samples) EXPECT_GT(s.seconds, 0);
      EXPECT_EQ(samples->back().bytes, measured.largest_bytes);
    }
    EXPECT_GT(measured.cost.encode.beta_s_per_byte, 0);
    EXPECT_EQ(measured.cost.encode.latency_s(), 0);
    EXPECT_EQ(measured.cost.decode.latency_s(), 0);
  }
}

TEST(MeasureCodec, MatricesFromTheLeastOnThatPay) {
  for (const auto& [spec, smallest] : {std::pair("powersgd:2", 256), std::pair("powersgd:8", 4096),
                                       std::pair("powersgd:64", 256 << 10)}) {
    const MeasuredCodec measured = measure_codec(spec, 0.002);
    EXPECT_EQ(measured.encode.front().bytes, smallest) << spec;
    EXPECT_LT(measured.message_bytes, measured.largest_bytes) << spec;
  }
}

// Casts and groups are kernels, others code on the host what is copied.
TEST(MeasureCodec, OnADevice) {
  for (const char* spec : {"fp16", "int8", "onebit", "topk:0.01", "dgc:0.01", "powersgd:2"}) {
    const auto cuda = make_emulated_cuda({});
    const int64_t before = cuda->live();
    const MeasuredCodec measured = measure_codec(spec, 0.002, cuda);
    EXPECT_EQ(cuda->live(), before) << spec;
    EXPECT_TRUE(measured.cost.at_once);
    const MeasuredCodec host = measure_codec(spec, 0.002);
    EXPECT_FALSE(host.cost.at_once);
    const auto codec = make_codec(spec);
    const int64_t count = measured.largest_bytes / itemsize(DType::float32);
    if (!codec->matrices()) {
      EXPECT_EQ(measured.message_bytes, codec->message_bytes(count));
    }
    // Of all ranks' messages, unless the network has added them.
    const int64_t together = codec->adds() || codec->matrices() ? 1 : 4;
    EXPECT_EQ(measured.encode.back().bytes, measured.largest_bytes);
    EXPECT_EQ(measured.decode.back().bytes, together * measured.largest_bytes) << spec;
  }
}

// The device's time counts, not only the host's that puts work on it: kernels are late by a
// tenth of a millisecond on average.
TEST(MeasureCodec, WaitsForTheDevice) {
  for (const char* spec : {"fp16", "int8", "topk:0.01", "powersgd:2"}) {
    const MeasuredCodec measured = measure_codec(spec, 0.002, make_emulated_cuda({2e-4, 1}));
    EXPECT_GT(measured.cost.encode.alpha_s, 3e-5) << spec;
    EXPECT_GT(measured.cost.decode.alpha_s, 3e-5) << spec;
  }
}

TEST(MeasureCodec, AFailureOfTheDeviceIsOne) {
  const auto cuda = make_emulated_cuda({});
  cuda->poison("out of order");
  EXPECT_THROW(measure_codec("int8", 0.002, cuda), FaultError);
}

TEST(MeasureCodec, RefusesNothingToMeasure) {
  EXPECT_THROW(measure_codec("none", 1), UsageError);
  EXPECT_THROW(measure_codec("zip", 1), UsageError);
  for (double budget : {0.0, -1.0, std::nan("")}) {
    EXPECT_THROW(measure_codec("fp16", budget), UsageError);
  }
}

}  // namespace
}  // namespace usbyte
