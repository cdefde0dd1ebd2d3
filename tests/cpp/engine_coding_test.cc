// SPDX-License-Identifier: Apache-2.0
// Ops with codecs: what arrives, what is remembered, and how they mix with others.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "coded_plan.h"
#include "comm/local_communicator.h"
#include "engine_rig.h"
#include "ranks.h"
#include "usbyte/codec.h"
#include "usbyte/engine.h"

namespace usbyte {
namespace {

using test::coded_gradient;
using test::get;
using test::message_of;
using test::on_each_rank;
using test::put;
using test::Random;
using test::random_coded_plan;

// What codecs of all ranks do, one after the other, in the simplest way.
class Reference {
 public:
  Reference(const Plan& plan, int size, uint64_t seed)
      : plan_(plan),
        seed_(seed),
        flat_buffers_(static_cast<size_t>(size),
                      std::vector<std::byte>(static_cast<size_t>(plan.flat_buffer_bytes()))),
        rows_(static_cast<size_t>(size)) {
    for (auto& rows : rows_) rows.resize(static_cast<size_t>(2 * plan.numel()));
  }

  // As every rank's flat buffer holds it.
  std::vector<float> step(int64_t step) {
    for (size_t r = 0; r < flat_buffers_.size(); ++r) {
      for (int64_t e = 0; e < plan_.numel(); ++e) {
        put(plan_, flat_buffers_[r].data(), e, coded_gradient(static_cast<int>(r), step, e));
      }
    }
    for (const Op& op : plan_.ops()) {
      const auto codec = make_codec(op.codec);
      const bool rounds = codec && codec->matrices() && op.kind != Collective::all_reduce;
      const int size = static_cast<int>(flat_buffers_.size());
      const int shards = op.kind == Collective::all_reduce ? 1 : size;
      for (Block b : op.blocks) {
        if (rounds) {
          round(op, *codec, b, step);
          continue;
        }
        for (int s = 0; s < shards; ++s) {
          const Block part = shard(b, s, shards);
          if (op.kind == Collective::all_gather) {
            gather(codec.get(), part, s, step);
          } else {
            reduce(codec.get(), part, step);
          }
        }
      }
    }
    std::vector<float> out;
    for (int64_t e = 0; e < plan_.numel(); ++e)
      out.push_back(get(plan_, flat_buffers_[0].data(), e));
    return out;
  }
  const std::vector<float>& codec_state(int rank) const { return rows_[static_cast<size_t>(rank)]; }

 private:
  std::vector<float> values(size_t rank, Block b) const {
    std::vector<float> out;
    for (int64_t e = b.begin; e < b.end; ++e)
      out.push_back(get(plan_, flat_buffers_[rank].data(), e));
    return out;
  }
  void set(size_t rank, Block b, const std::vector<float>& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      put(plan_, flat_buffers_[rank].data(), b.begin + static_cast<int64_t>(i), values[i]);
    }
  }
  CodecState state_at(size_t rank, Block b, uint64_t note = 0) {
    float* const rows = rows_[rank].data();
    return {{rows + b.begin, rows + plan_.numel() + b.begin}, note};
  }

  std::vector<std::byte> sent(const Codec& codec, size_t rank, Block b, uint64_t seed,
                              int64_t step) {
    std::vector<std::byte> message(static_cast<size_t>(codec.message_bytes(b.numel())));
    uint64_t& note = notes_[{rank, b, seed}];
    CodecState codec_state = state_at(rank, b, note);
    codec.send(values(rank, b), codec_state,
               RngKey::of(seed, step, b.begin, static_cast<int>(rank)),
               static_cast<int>(flat_buffers_.size()), message.data());
    note = codec_state.note;
    return message;
  }

  void reduce(const Codec* codec, Block b, int64_t step) {
    std::vector<float> sum(static_cast<size_t>(b.numel()));
    std::vector<std::vector<std::byte>> messages;
    for (size_t r = 0; r < flat_buffers_.size(); ++r) {
      if (codec) {
        messages.push_back(sent(*codec, r, b, seed_, step));
      } else {
        const std::vector<float> own = values(r, b);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += own[i];
      }
    }
    if (codec) {
      std::vector<const std::byte*> all;
      for (const auto& message : messages) all.push_back(message.data());
      codec->combine(all, RngKey::of(seed_, step, b.begin, 0), sum);
    }
    for (size_t r = 0; r < flat_buffers_.size(); ++r) set(r, b, sum);
  }

  void gather(const Codec* codec, Block b, int owner, int64_t step) {
    if (!codec) return;
    const std::vector<std::byte> message =
        sent(*codec, static_cast<size_t>(owner), b, seed_ + 1, step);
    std::vector<float> out(static_cast<size_t>(b.numel()));
    codec->decode(message.data(), RngKey::of(seed_ + 1, step, b.begin, 0), out);
    for (size_t r = 0; r < flat_buffers_.size(); ++r) set(r, b, out);
  }

  void round(const Op& op, const Codec& codec, Block b, int64_t step) {
    const TensorSpec& t = *plan_.tensor_at(b);
    const Matrices& m = *codec.matrices();
    const bool first = op.kind == Collective::reduce_scatter;
    const auto count = static_cast<size_t>(m.rank() * (first ? t.rows : t.cols()));
    std::vector<float> sum(count), part(count);
    std::vector<float> p;
    for (size_t r = 0; r < flat_buffers_.size(); ++r) {
      CodecState codec_state = state_at(r, b);
      const RngKey rng = RngKey::of(seed_, step, b.begin, static_cast<int>(r));
      p = firsts_[b];
      if (first) {
        m.first(values(r, b), t.rows, codec_state, rng, part);
      } else {
        m.second(t.rows, t.cols(), codec_state, p, part);
      }
      for (size_t i = 0; i < count; ++i) sum[i] += part[i];
    }
    if (first) {
      firsts_[b] = sum;
      return;
    }
    for (size_t r = 0; r < flat_buffers_.size(); ++r) {
      CodecState codec_state = state_at(r, b);
      std::vector<float> out(static_cast<size_t>(b.numel()));
      m.finish(t.rows, p, sum, codec_state, out);
      set(r, b, out);
    }
  }

  const Plan& plan_;
  const uint64_t seed_;
  std::vector<std::vector<std::byte>> flat_buffers_;               // by rank
  std::vector<std::vector<float>> rows_;                           // of codec state, by rank
  std::map<std::tuple<size_t, Block, uint64_t>, uint64_t> notes_;  // the last tells kinds apart
  std::map<Block, std::vector<float>> firsts_;                     // sums of first rounds
};

class CodedPlans : public testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Engine, CodedPlans, testing::Range<uint64_t>(0, 40));

TEST_P(CodedPlans, DoWhatTheirCodecsDo) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = random_coded_plan(random);
  const int size = static_cast<int>(1 + seed % 5);
  constexpr int64_t kSteps = 4;
  Reference reference(plan, size, seed);
  std::vector<std::vector<float>> want;
  for (int64_t step = 1; step <= kSteps; ++step) want.push_back(reference.step(step));
  auto ranks = make_local_communicators(size, {seed % 2 ? 1e-4 : 0, 0});
  on_each_rank(size, [&](int rank) {
    std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
    std::vector<float> codec_state(static_cast<size_t>(2 * plan.numel()));
    EngineOptions options;
    options.stall_limit_s = 60;
    options.codec_state = codec_state.data();
    options.seed = seed;
    Engine engine(plan, flat_buffer.data(), *ranks[static_cast<size_t>(rank)], options);
    for (int64_t step = 1; step <= kSteps; ++step) {
      engine.begin_step();
      for (size_t t = plan.tensors().size(); t-- > 0;) {
        const TensorSpec& tensor = plan.tensors()[t];
        for (int64_t e = tensor.offset; e < tensor.end(); ++e) {
          put(plan, flat_buffer.data(), e, coded_gradient(rank, step, e));
        }
        engine.ready(static_cast<int>(t));
      }
      engine.end_backward();
      for (size_t t = 0; t < plan.tensors().size(); ++t) {
        engine.wait(static_cast<int>(t));
        const TensorSpec& tensor = plan.tensors()[t];
        for (int64_t e = tensor.offset; e < tensor.end(); ++e) {
          // Where the network adds up 16-bit numbers it rounds after each rank, and in the order
          // of its ranks.
          const float expected = want[static_cast<size_t>(step - 1)][static_cast<size_t>(e)];
          ASSERT_NEAR(get(plan, flat_buffer.data(), e), expected, 0.3 * size) << tensor.name;
        }
      }
      engine.drain();
      for (auto [launched, done] : engine.op_times()) EXPECT_GE(done, launched);
    }
    for (const Op& op : plan.ops()) {
      const auto codec = make_codec(op.codec);
      if (!codec) continue;
      for (Block b : op.blocks) {
        for (int64_t e = b.begin; e < b.end; ++e) {
          const auto i = static_cast<size_t>(e);
          const size_t second = i + static_cast<size_t>(plan.numel());
          const std::vector<float>& expected = reference.codec_state(rank);
          const double far = codec->matrices() ? 0.05 : 0;
          ASSERT_NEAR(codec_state[i], expected[i], far) << op.codec;
          ASSERT_NEAR(codec_state[second], expected[second], far) << op.codec;
          if (!codec->adds() && plan.dtype(b) == DType::float32 && op.codec != "none") {
            ASSERT_EQ(get(plan, flat_buffer.data(), e), want.back()[i]) << op.codec;
          }
        }
      }
    }
  });
}

Plan one_op(const std::string& codec, int64_t numel = 64) {
  return Plan("test", {{"a", numel, DType::float32, 0}},
              {{Collective::all_reduce, {{0, numel}}, 1 << 20, false, codec}});
}

TEST(EngineCoding, WhatIsNotFiniteIsSeenOnceAndNotRemembered) {
  const Plan plan = one_op("int8");
  auto ranks = make_local_communicators(1, {});
  std::vector<float> flat_buffer(64), codec_state(64);
  EngineOptions options;
  options.codec_state = codec_state.data();
  Engine engine(plan, reinterpret_cast<std::byte*>(flat_buffer.data()), *ranks[0], options);
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < flat_buffer.size(); ++i) flat_buffer[i] = static_cast<float>(i);
    if (step == 1) flat_buffer[5] = std::numeric_limits<float>::infinity();
    engine.begin_step();
    engine.ready(0);
    engine.end_backward();
    engine.drain();
    EXPECT_EQ(std::isfinite(flat_buffer[5]), step != 1);
    EXPECT_TRUE(std::isfinite(codec_state[5]));
    // What was to travel with it is still to come.
    EXPECT_EQ(std::abs(codec_state[40]) > 39, step == 1);
  }
}

TEST(EngineCoding, WhatIsNotFiniteIsSeenInItsStepAlthoughItIsNotDrawn) {
  const Plan plan = one_op("randk:0.1");
  auto ranks = make_local_communicators(1, {});
  std::vector<float> flat_buffer(64), codec_state(64);
  EngineOptions options;
  options.codec_state = codec_state.data();
  Engine engine(plan, reinterpret_cast<std::byte*>(flat_buffer.data()), *ranks[0], options);
  const auto is_nan = [](float value) { return std::isnan(value); };
  for (int step = 0; step < 300; ++step) {
    std::fill(flat_buffer.begin(), flat_buffer.end(), 1.0F);
    if (step % 50 == 0) flat_buffer[static_cast<size_t>(step / 50)] = std::nanf("");
    engine.begin_step();
    engine.ready(0);
    engine.end_backward();
    engine.drain();
    EXPECT_EQ(std::ranges::any_of(flat_buffer, is_nan), step % 50 == 0) << step;
    EXPECT_TRUE(std::ranges::none_of(codec_state, is_nan)) << step;
  }
}

TEST(EngineCoding, FeedbackNeedsACodecState) {
  const Plan plan = one_op("topk:0.5");
  auto ranks = make_local_communicators(1, {});
  std::vector<std::byte> flat_buffer(256);
  const std::string error =
      message_of<UsageError>([&] { Engine(plan, flat_buffer.data(), *ranks[0]); });
  EXPECT_NE(error.find("'topk:0.5' needs a codec state"), std::string::npos) << error;
}

TEST(EngineCoding, OpsAreLaunchedInOrderOfThePlanThoughTheirMessagesTakeTime) {
  std::vector<TensorSpec> tensors;
  std::vector<Op> ops;
  for (int t = 0; t < 6; ++t) {
    const int64_t numel = t % 2 ? 4 : 400000;  // what is coded takes longer
    const int64_t begin = t == 0 ? 0 : tensors.back().end();
    tensors.push_back({std::string(1, static_cast<char>('a' + t)), numel, DType::float32, begin});
    ops.push_back({Collective::all_reduce,
                   {{begin, begin + numel}},
                   1 << 30,
                   false,
                   t % 2 ? "none" : "int8"});
  }
  const Plan plan("test", tensors, ops);
  std::vector<float> codec_state(static_cast<size_t>(plan.numel()));
  EngineOptions options;
  options.codec_state = codec_state.data();
  test::Rig rig(plan, options);
  rig.backward();
  ASSERT_TRUE(rig.communicator.await_launches(6));
  const Collective coded = Collective::all_gather, plain = Collective::all_reduce;
  EXPECT_EQ(rig.communicator.kinds(),
            (std::vector<Collective>{coded, plain, coded, plain, coded, plain}));
  for (int i = 5; i >= 0; --i) rig.complete(i);
  rig->drain();
}

TEST(EngineCoding, AFailureNamesTheOpAndItsCodec) {
  std::vector<float> codec_state(64);
  EngineOptions options;
  options.codec_state = codec_state.data();
  test::Rig rig(one_op("int8"), options);
  rig.backward();
  rig.fail_op(0, "lost");
  const std::string error = message_of<FaultError>([&] { rig->drain(); });
  EXPECT_NE(error.find("by int8: a) of step 1 failed: lost"), std::string::npos) << error;
}

}  // namespace
}  // namespace usbyte
