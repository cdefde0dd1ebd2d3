// SPDX-License-Identifier: Apache-2.0
// Kernels of codecs: the same as the codecs of the host.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec_rig.h"
#include "cuda/emulation/host_kernels.h"
#include "kernel_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::Memory;
using test::message_of;
using test::Random;
using test::RunInShape;
using test::WriteCounter;

/// Blocks of whole teams.
std::vector<RunInShape> shapes() { return {{1, 32}, {3, 64}, {7, 96}, {64, 256}}; }

template <typename T>
T narrow(float x) {
  return from_float<T>(x);
}
template <>
float narrow(float x) {
  return x;
}

/// Gradients as the flat buffer has them, some of them not finite in every fourth; in every second
/// there are zeros, at each place of a byte of signs.
template <typename T>
std::vector<T> flat_buffer_values(Random& random, int64_t count) {
  std::vector<T> out;
  for (float x : test::gradient(random, count)) out.push_back(narrow<T>(x));
  if (random.one_in(2)) {
    for (size_t i = 0; i < out.size(); ++i) {
      if (i % 8 == i / 8 % 8) out[i] = narrow<T>(random.one_in(2) ? 0.0F : -0.0F);
    }
  }
  if (count > 0 && random.one_in(4)) {
    constexpr float kBad[] = {test::kNan, test::kInfinity, -test::kInfinity};
    out[static_cast<size_t>(random(0, count - 1))] = narrow<T>(kBad[random(0, 2)]);
  }
  return out;
}

template <typename T>
void expect_same(std::span<const T> got, std::span<const T> want, const std::string& what) {
  for (size_t i = 0; i < want.size(); ++i) {
    const float a = to_float(got[i]), b = to_float(want[i]);
    ASSERT_TRUE((std::isnan(a) && std::isnan(b)) || std::memcmp(&got[i], &want[i], sizeof(T)) == 0)
        << what << ": " << a << ", not " << b << ", at " << i << " of " << want.size();
  }
}

class GroupKernels : public testing::TestWithParam<std::string> {
 protected:
  const std::shared_ptr<const Codec> codec_ = make_codec(GetParam());
  const GroupCodec kernels_ = codec_->kernels().value();
  const int64_t word_ = codec_->adds() ? 2 : 4;  // bytes that messages are whole numbers of

  /// Where all memory is aligned, whole groups are moved at once.
  template <typename T>
  void encodes_as_the_host(DType dtype, bool aligned);
  template <typename T>
  void decodes_as_the_host(DType dtype, bool aligned);
};
INSTANTIATE_TEST_SUITE_P(Codecs, GroupKernels,
                         testing::Values("fp16", "bf16", "int8", "fp8", "fp8:e5m2", "qsgd:2",
                                         "qsgd:4", "qsgd:8", "terngrad", "signsgd", "signum",
                                         "signum:0.5", "efsignsgd", "onebit", "int8,feedback=off",
                                         "onebit,feedback=off"),
                         [](const auto& of) {
                           std::string name = of.param;
                           for (char& c : name)
                             c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

// Three steps of several runs in one call.
template <typename T>
void GroupKernels::encodes_as_the_host(DType dtype, bool aligned) {
  Random random(static_cast<uint64_t>(dtype));
  for (RunInShape& shape : shapes()) {
    std::vector<int64_t> counts = {1, 3, 4, 31, 33, 255, 256, 257, 1000, 1024, 1025, 3001, 4096};
    const auto skew = [&](int64_t itemsize) {
      return aligned ? 0 : random(0, 15) / itemsize * itemsize;
    };
    struct Run {
      Run(int64_t count, int64_t values_skew, int64_t kept_skew, int64_t bytes,
          int64_t message_skew)
          : values(count * int64_t{sizeof(T)}, values_skew),
            kept(count * 4, kept_skew),
            message(bytes, message_skew),
            want_kept(static_cast<size_t>(count)) {
        std::ranges::fill(kept.bytes(), std::byte{0});
      }
      Memory values, kept, message;
      std::vector<float> want_kept;
    };
    std::vector<std::unique_ptr<Run>> runs;
    for (int64_t count : counts) {
      runs.push_back(std::make_unique<Run>(count, skew(sizeof(T)), skew(4),
                                           codec_->message_bytes(count), skew(word_)));
    }
    for (int64_t step = 0; step < 3; ++step) {
      std::vector<GroupEncoding> encodings;
      std::vector<std::vector<std::byte>> wanted;
      for (size_t i = 0; i < runs.size(); ++i) {
        Run& run = *runs[i];
        const std::vector<T> values = flat_buffer_values<T>(random, counts[i]);
        std::ranges::copy(values, run.values.template as<T>().begin());
        std::ranges::fill(run.message.bytes(), std::byte{0x77});
        const RngKey rng = RngKey::of(3, step, static_cast<int64_t>(i), 1);
        encodings.push_back({run.values.data(),
                             codec_->state_rows() ? run.kept.template as<float>().data() : nullptr,
                             run.message.data(), counts[i], rng.own});
        std::vector<float> gradient;
        for (T x : values) gradient.push_back(to_float(x));
        CodecState state;
        state.rows[0] = run.want_kept.data();
        wanted.emplace_back(run.message.bytes().size());
        codec_->send(gradient, state, rng, 2, wanted.back().data());
      }
      kernels::encode_groups(kernels_, encodings, dtype, shape);
      for (size_t i = 0; i < runs.size(); ++i) {
        const auto got = runs[i]->message.bytes();
        const std::string what = GetParam() + ", step " + std::to_string(step);
        // NaNs have many spellings.
        std::vector<float> a(static_cast<size_t>(counts[i])), b(a);
        const std::span<const float> decoded(a), want(b);
        codec_->decode(got.data(), {}, a);
        codec_->decode(wanted[i].data(), {}, b);
        expect_same(decoded, want, what);
        if (std::ranges::all_of(b, [](float x) { return std::isfinite(x); })) {
          ASSERT_TRUE(std::ranges::equal(got, wanted[i])) << what << " of " << counts[i];
        }
        expect_same<float>(runs[i]->kept.template as<float>(), runs[i]->want_kept, what);
      }
    }
  }
}

TEST_P(GroupKernels, EncodeAsTheHostDoes) {
  for (bool aligned : {false, true}) {
    encodes_as_the_host<float>(DType::float32, aligned);
    encodes_as_the_host<Half>(DType::float16, aligned);
    encodes_as_the_host<BFloat16>(DType::bfloat16, aligned);
  }
}

template <typename T>
void GroupKernels::decodes_as_the_host(DType dtype, bool aligned) {
  Random random(5);
  for (RunInShape& shape : shapes()) {
    for (int ranks : {1, 2, 3, 5}) {
      for (int64_t count : {1, 3, 4, 31, 33, 257, 512, 1025, 3001, 4096}) {
        const int64_t bytes = codec_->message_bytes(count);
        const int64_t stride = aligned ? (bytes + 15) / 16 * 16 : bytes + word_ * random(0, 2);
        Memory messages(stride * ranks, aligned ? 0 : random(0, 3) * word_);
        std::vector<const std::byte*> each;
        for (int r = 0; r < ranks; ++r) {
          const std::vector<float> gradient = test::gradient(random, count);
          std::byte* const message = messages.data() + r * stride;
          codec_->encode(gradient, RngKey::of(1, 1, 0, r), message);
          each.push_back(message);
        }
        std::vector<float> sum(static_cast<size_t>(count));
        codec_->combine(each, {}, sum);
        std::vector<T> want;
        for (float x : sum) want.push_back(narrow<T>(x));
        const auto skew = aligned ? 0 : random(0, 15) / int64_t{sizeof(T)} * int64_t{sizeof(T)};
        Memory values(count * int64_t{sizeof(T)}, skew);
        const GroupDecoding decoding{values.data(), messages.data(), count};
        kernels::decode_groups(kernels_, {&decoding, 1}, dtype, ranks, stride, shape);
        expect_same<T>(values.as<T>(), want, GetParam());
      }
    }
  }
}

TEST_P(GroupKernels, DecodeAsTheHostDoes) {
  for (bool aligned : {false, true}) {
    decodes_as_the_host<float>(DType::float32, aligned);
    decodes_as_the_host<Half>(DType::float16, aligned);
    decodes_as_the_host<BFloat16>(DType::bfloat16, aligned);
  }
}

TEST_P(GroupKernels, WriteEveryByteOnce) {
  Random random(6);
  for (int64_t count : {1, 37, 1100, 2048}) {
    std::vector<float> gradient(static_cast<size_t>(count));
    for (float& x : gradient) x = static_cast<float>(random(1, 1000));
    const int64_t skew = count % 16 == 0 ? 0 : 4;
    Memory kept(4 * count, skew), message(codec_->message_bytes(count), 2 * skew);
    const GroupEncoding encoding{gradient.data(),
                                 codec_->state_rows() ? kept.as<float>().data() : nullptr,
                                 message.data(), count, 7};
    RunInShape once{2, 64};
    std::ranges::fill(kept.bytes(), std::byte{0});
    kernels::encode_groups(kernels_, {&encoding, 1}, DType::float32, once);
    // What differs from what is written in every byte.
    for (std::byte& b : message.bytes()) b = ~b;
    std::ranges::fill(kept.bytes(), std::byte{0});
    WriteCounter counter(message.bytes());
    RunInShape counted{2, 64};
    counted.after_thread = std::ref(counter);
    kernels::encode_groups(kernels_, {&encoding, 1}, DType::float32, counted);
    EXPECT_EQ(counter.counts(), std::vector<int>(message.bytes().size(), 1)) << count;
  }
}

/// Floats of which the quotient is not that of a division.
template <int32_t Divisor>
int64_t wrong_quotients() {
  int64_t wrong = 0;
  const auto check = [&](uint32_t bits) {
    const auto x = std::bit_cast<float>(bits);
    const float got = kernels::divided_by<Divisor>(x), want = x / static_cast<float>(Divisor);
    const bool same = std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(want);
    wrong += !same && !(std::isnan(got) && std::isnan(want));
  };
  // All significands: of subnormals, quotients that become so, others, and what is not finite.
  for (uint32_t exponent : {0, 1, 2, 3, 4, 7, 8, 9, 127, 254, 255}) {
    for (uint32_t significand = 0; significand < 1U << 23; ++significand) {
      check(exponent << 23 | significand);
    }
    check(1U << 31 | exponent << 23 | 0x155555);
  }
  return wrong;
}

TEST(GroupKernels, DivideByLevelsAsADivisionDoes) {
  EXPECT_EQ(wrong_quotients<7>(), 0);
  EXPECT_EQ(wrong_quotients<127>(), 0);
}

TEST(GroupKernels, ManyRunsTakeSeveralLaunches) {
  constexpr int64_t kRuns = 300, kCount = 5;
  const auto codec = make_codec("int8");
  const auto bytes = static_cast<size_t>(codec->message_bytes(kCount));
  std::vector<float> values(kRuns * kCount);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  std::vector<std::byte> messages(kRuns * bytes), want(bytes);
  std::vector<GroupEncoding> runs;
  for (size_t i = 0; i < kRuns; ++i) {
    runs.push_back({values.data() + i * kCount, nullptr, messages.data() + i * bytes, kCount, 0});
  }
  RunInShape run{4, 64};
  kernels::encode_groups(*codec->kernels(), runs, DType::float32, run);
  EXPECT_GT(run.launches, 1);
  for (size_t i = 0; i < kRuns; ++i) {
    codec->encode({values.data() + i * kCount, kCount}, {}, want.data());
    ASSERT_EQ(std::memcmp(messages.data() + i * bytes, want.data(), bytes), 0) << i;
  }
}

TEST(GroupKernels, RefuseWhatTheyCannotTake) {
  alignas(8) std::byte place[64] = {};
  const auto encode = [](GroupEncoding run, DType dtype) {
    host::encode_groups({GroupCodec::Kind::int8}, {&run, 1}, dtype);
  };
  const auto error_of = [&](GroupEncoding run, DType dtype) {
    return message_of<UsageError>([&] { encode(run, dtype); });
  };
  const GroupEncoding good{place, nullptr, place + 16, 4, 0};
  EXPECT_NO_THROW(encode(good, DType::float32));
  EXPECT_NE(error_of(good, DType::float64).find("does not take float64"), std::string::npos);
  GroupEncoding bad = good;
  bad.message = place + 1;
  EXPECT_NE(error_of(bad, DType::float32).find("message to encode of entry 0 is not aligned"),
            std::string::npos);
  bad = good;
  bad.values = nullptr;
  EXPECT_NE(error_of(bad, DType::float32).find("is null but has 4"), std::string::npos);
  const GroupDecoding run{place, place + 16, 4};
  const std::string error = message_of<UsageError>(
      [&] { host::decode_groups({GroupCodec::Kind::int8}, {&run, 1}, DType::float32, 0, 8); });
  EXPECT_NE(error.find("of 0 ranks"), std::string::npos);
}

}  // namespace
}  // namespace usbyte
