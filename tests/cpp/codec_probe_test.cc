// SPDX-License-Identifier: Apache-2.0
#include "engine/coding/codec_probe.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "cuda/emulation/emulated_cuda.h"
#include "random_job.h"
#include "traced_cuda.h"
#include "usbyte/codec.h"
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

constexpr double kKernelS = 1e-3;

// Kernels take a while, and the call of a number that is told fails.
class ScriptedCuda final : public test::TracedCuda {
 public:
  explicit ScriptedCuda(int64_t fails = std::numeric_limits<int64_t>::max())
      : TracedCuda(make_emulated_cuda({})), fails_(fails) {}

  void* allocate(size_t bytes) override {
    count();
    return TracedCuda::allocate(bytes);
  }
  void* allocate_pinned(size_t bytes) override {
    count();
    return TracedCuda::allocate_pinned(bytes);
  }
  void record(CudaEvent event, CudaStream stream) override {
    count();
    TracedCuda::record(event, stream);
  }
  void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                     CudaStream stream) override {
    count();
    inner().delay(stream, kKernelS);
    TracedCuda::copy_segments(segments, from, to, scale, stream);
  }
  void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype,
                     CudaStream stream) override {
    count();
    inner().delay(stream, kKernelS);
    TracedCuda::encode_groups(codec, runs, dtype, stream);
  }
  void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                     int64_t stride, CudaStream stream) override {
    count();
    inner().delay(stream, kKernelS);
    TracedCuda::decode_groups(codec, runs, dtype, ranks, stride, stream);
  }

 private:
  void count() {
    if (++calls_ == fails_) throw FaultError("out of order");
  }

  const int64_t fails_;
  std::atomic<int64_t> calls_ = 0;
};

// Casts and groups are kernels, others code on the host what is copied.
TEST(MeasureCodec, OnADevice) {
  for (const char* spec : {"fp16", "int8", "onebit", "topk:0.01", "dgc:0.01", "powersgd:2"}) {
    const auto cuda = make_emulated_cuda({});
    const int64_t before = cuda->live();
    const MeasuredCodec measured = measure_codec(spec, 0.002, cuda);
    EXPECT_EQ(cuda->live(), before) << spec;
    EXPECT_TRUE(measured.cost.at_once);
    EXPECT_FALSE(measure_codec(spec, 0.002).cost.at_once);
    const auto codec = make_codec(spec);
    const int64_t count = measured.largest_bytes / itemsize(DType::float32);
    if (!codec->matrices()) {
      EXPECT_EQ(measured.message_bytes, codec->message_bytes(count));
    }
    EXPECT_EQ(measured.encode.back().bytes, measured.largest_bytes);
    EXPECT_EQ(measured.decode.back().bytes, measured.largest_bytes);
    EXPECT_GE(measured.cost.further_s_per_byte, 0);
    if (codec->adds()) {
      EXPECT_EQ(measured.cost.further_s_per_byte, 0);
    }
  }
}

// The device's time counts, not the host's that puts work on it.
TEST(MeasureCodec, WaitsForTheDevice) {
  for (const char* spec : {"fp16", "int8"}) {
    const MeasuredCodec measured = measure_codec(spec, 0.002, std::make_shared<ScriptedCuda>());
    for (const auto* samples : {&measured.encode, &measured.decode}) {
      for (const Sample& s : *samples) EXPECT_GE(s.seconds, 0.99 * kKernelS) << spec;
    }
  }
}

TEST(MeasureCodec, FailuresOfTheDeviceLeaveNothingBehind) {
  for (const char* spec : {"int8", "topk:0.1", "powersgd:2"}) {
    int failures = 0;
    for (int64_t call = 1; call < 200; call += call < 20 ? 1 : 29) {
      const auto cuda = std::make_shared<ScriptedCuda>(call);
      const int64_t before = cuda->inner().live();
      try {
        measure_codec(spec, 0.002, cuda);
      } catch (const FaultError&) {
        ++failures;  // unless it was at the end of some work, of which nothing was asked any more
      }
      EXPECT_EQ(cuda->inner().live(), before) << spec << ", " << call;
    }
    EXPECT_GE(failures, 20) << spec;
  }
}

TEST(MeasureCodec, WithoutRoomForTheLargestSizes) {
  class Small final : public test::TracedCuda {
   public:
    Small() : TracedCuda(make_emulated_cuda({})) {}
    void* allocate(size_t bytes) override {
      if (bytes > 1 << 20) throw FaultError("out of memory");
      return TracedCuda::allocate(bytes);
    }
  };
  const auto cuda = std::make_shared<Small>();
  const int64_t before = cuda->inner().live();
  const MeasuredCodec measured = measure_codec("int8", 1, cuda);
  EXPECT_EQ(measured.largest_bytes, 64 << 10);  // 16 of which have room
  EXPECT_EQ(cuda->inner().live(), before);
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
