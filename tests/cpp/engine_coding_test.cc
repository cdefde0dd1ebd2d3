// Ops with codecs: what arrives, what is remembered, and how they mix with others.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "engine_rig.h"
#include "random_plan.h"
#include "ranks.h"
#include "usbyte/codec.h"
#include "usbyte/engine.h"
#include "usbyte/half.h"
#include "usbyte/local_communicator.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Random;

constexpr const char* kSpecs[] = {"none",   "fp16",     "bf16",    "fp8",       "int8",  "topk:0.2",
                                  "qsgd:4", "terngrad", "signsgd", "efsignsgd", "onebit"};

float gradient(int rank, int64_t step, int64_t element) {
  Random random(static_cast<uint64_t>(rank + 10 * step + 1000 * element));
  return static_cast<float>(random(-1000, 1000)) / 64;
}

// Tensors of several dtypes, in all_reduces of random blocks, each tensor with a codec.
Plan random_coded_plan(Random& random) {
  std::vector<TensorSpec> tensors = random_tensors(random.engine(), false);
  DType dtype = DType::float32;
  for (TensorSpec& t : tensors) {
    if (random.one_in(4)) {
      constexpr DType kTypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};
      dtype = kTypes[random(0, 3)];
    }
    t.dtype = dtype;
  }
  const Plan plain = random_plan(random.engine(), tensors);
  std::vector<Op> ops;
  for (const Op& op : plain.ops()) {
    if (op.kind == Collective::all_gather) continue;
    ops.push_back(op);
    ops.back().kind = Collective::all_reduce;
  }
  std::vector<std::string> codecs;
  for (size_t i = 0; i < tensors.size(); ++i) codecs.emplace_back(kSpecs[random(0, 10)]);
  return with_codecs(plain.with("test", ops), codecs);
}

void put(const Plan& plan, std::byte* arena, int64_t element, float value) {
  std::byte* const at = arena + plan.byte_offset(element);
  const auto store = [at](auto x) { std::memcpy(at, &x, sizeof x); };
  switch (plan.dtype({element, element + 1})) {
    case DType::float64:
      return store(static_cast<double>(value));
    case DType::float16:
      return store(from_float<Half>(value));
    case DType::bfloat16:
      return store(from_float<BFloat16>(value));
    default:
      return store(value);
  }
}

float get(const Plan& plan, const std::byte* arena, int64_t element) {
  const std::byte* const at = arena + plan.byte_offset(element);
  const auto load = [at](auto x) {
    std::memcpy(&x, at, sizeof x);
    return x;
  };
  switch (plan.dtype({element, element + 1})) {
    case DType::float64:
      return static_cast<float>(load(double{}));
    case DType::float16:
      return to_float(load(Half{}));
    case DType::bfloat16:
      return to_float(load(BFloat16{}));
    default:
      return load(float{});
  }
}

// What codecs of all ranks do, one after the other, in the simplest way.
class Reference {
 public:
  Reference(const Plan& plan, int size, uint64_t seed)
      : plan_(plan), seed_(seed), memory_(static_cast<size_t>(size)) {
    for (auto& m : memory_) m.resize(static_cast<size_t>(plan.numel()));
  }

  // As the arena holds it, for gradients that every rank wrote there.
  std::vector<float> step(int64_t step) {
    std::vector<std::byte> arena(static_cast<size_t>(plan_.arena_bytes()));
    for (const Op& op : plan_.ops()) {
      for (Block b : op.blocks) block(op, b, step, arena.data());
    }
    std::vector<float> out;
    for (int64_t e = 0; e < plan_.numel(); ++e) out.push_back(get(plan_, arena.data(), e));
    return out;
  }
  const std::vector<float>& memory(int rank) const { return memory_[static_cast<size_t>(rank)]; }

 private:
  void block(const Op& op, Block b, int64_t step, std::byte* arena) {
    const auto codec = make_codec(op.codec);
    const auto count = static_cast<size_t>(b.numel());
    std::vector<float> sum(count);
    std::vector<std::vector<std::byte>> messages;
    for (size_t r = 0; r < memory_.size(); ++r) {
      const int rank = static_cast<int>(r);
      std::vector<float> values(count);
      for (size_t i = 0; i < count; ++i) {
        const int64_t element = b.begin + static_cast<int64_t>(i);
        put(plan_, arena, element, gradient(rank, step, element));
        values[i] = get(plan_, arena, element);
      }
      const Draw draw = Draw::of(seed_, step, b.begin, rank);
      float* const kept = memory_[r].data() + b.begin;
      const bool remembers = codec && codec->wants_feedback();
      for (size_t i = 0; remembers && i < count; ++i) values[i] = kept[i] += values[i];
      std::vector<float> sent = values;
      if (codec) {
        messages.emplace_back(static_cast<size_t>(codec->message_bytes(b.numel())));
        codec->encode(values, draw, messages.back().data());
        codec->decode(messages.back().data(), draw, sent);
      }
      for (size_t i = 0; i < count; ++i) {
        sum[i] += sent[i];
        if (remembers) kept[i] -= sent[i];
      }
    }
    if (codec && !codec->adds()) {
      std::vector<const std::byte*> all;
      for (const auto& message : messages) all.push_back(message.data());
      codec->combine(all, {}, sum);
    }
    for (size_t i = 0; i < count; ++i) {
      put(plan_, arena, b.begin + static_cast<int64_t>(i), sum[i]);
    }
  }

  const Plan& plan_;
  const uint64_t seed_;
  std::vector<std::vector<float>> memory_;  // by rank
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
    std::vector<std::byte> arena(static_cast<size_t>(plan.arena_bytes()));
    std::vector<float> memory(static_cast<size_t>(plan.numel()));
    EngineOptions options;
    options.stall_limit_s = 60;
    options.memory = memory.data();
    options.seed = seed;
    Engine engine(plan, arena.data(), *ranks[static_cast<size_t>(rank)], options);
    for (int64_t step = 1; step <= kSteps; ++step) {
      engine.begin_step();
      for (size_t t = plan.tensors().size(); t-- > 0;) {
        const TensorSpec& tensor = plan.tensors()[t];
        for (int64_t e = tensor.offset; e < tensor.end(); ++e) {
          put(plan, arena.data(), e, gradient(rank, step, e));
        }
        engine.ready(static_cast<int>(t));
      }
      engine.end_backward();
      for (size_t t = 0; t < plan.tensors().size(); ++t) {
        engine.wait(static_cast<int>(t));
        const TensorSpec& tensor = plan.tensors()[t];
        for (int64_t e = tensor.offset; e < tensor.end(); ++e) {
          // Where the network adds up 16-bit numbers it rounds after each rank.
          const float expected = want[static_cast<size_t>(step - 1)][static_cast<size_t>(e)];
          ASSERT_NEAR(get(plan, arena.data(), e), expected, 0.3 * size) << tensor.name;
        }
      }
      engine.drain();
      for (auto [launched, done] : engine.op_times()) EXPECT_GE(done, launched);
    }
    for (const Op& op : plan.ops()) {
      const auto codec = make_codec(op.codec);
      for (Block b : op.blocks) {
        for (int64_t e = b.begin; e < b.end; ++e) {
          const auto i = static_cast<size_t>(e);
          ASSERT_EQ(memory[i], reference.memory(rank)[i]) << op.codec;
          if (codec && !codec->adds() && plan.dtype(b) == DType::float32) {
            ASSERT_EQ(get(plan, arena.data(), e), want.back()[i]) << op.codec;
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
  std::vector<float> arena(64), memory(64);
  EngineOptions options;
  options.memory = memory.data();
  Engine engine(plan, reinterpret_cast<std::byte*>(arena.data()), *ranks[0], options);
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < arena.size(); ++i) arena[i] = static_cast<float>(i);
    if (step == 1) arena[5] = std::numeric_limits<float>::infinity();
    engine.begin_step();
    engine.ready(0);
    engine.end_backward();
    engine.drain();
    EXPECT_EQ(std::isfinite(arena[5]), step != 1);
    EXPECT_TRUE(std::isfinite(memory[5]));
    // What was to travel with it is still to come.
    EXPECT_EQ(std::abs(memory[40]) > 39, step == 1);
  }
}

TEST(EngineCoding, WhatIsNotFiniteIsRememberedUntilItIsSent) {
  const Plan plan = one_op("randk:0.1");
  auto ranks = make_local_communicators(1, {});
  std::vector<float> arena(64), memory(64);
  EngineOptions options;
  options.memory = memory.data();
  Engine engine(plan, reinterpret_cast<std::byte*>(arena.data()), *ranks[0], options);
  int seen = 0;
  for (int step = 0; step < 300; ++step) {
    std::fill(arena.begin(), arena.end(), 1.0F);
    if (step == 0) arena[5] = std::numeric_limits<float>::quiet_NaN();
    engine.begin_step();
    engine.ready(0);
    engine.end_backward();
    engine.drain();
    seen += std::isnan(arena[5]);
    EXPECT_EQ(std::isnan(memory[5]), seen == 0);
  }
  EXPECT_EQ(seen, 1);
}

TEST(EngineCoding, FeedbackNeedsAMemory) {
  const Plan plan = one_op("topk:0.5");
  auto ranks = make_local_communicators(1, {});
  std::vector<std::byte> arena(256);
  const std::string error = message_of<UsageError>([&] { Engine(plan, arena.data(), *ranks[0]); });
  EXPECT_NE(error.find("'topk:0.5' needs a memory"), std::string::npos) << error;
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
  std::vector<float> memory(static_cast<size_t>(plan.numel()));
  EngineOptions options;
  options.memory = memory.data();
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
  std::vector<float> memory(64);
  EngineOptions options;
  options.memory = memory.data();
  test::Rig rig(one_op("int8"), options);
  rig.backward();
  rig.fail_op(0, "lost");
  const std::string error = message_of<FaultError>([&] { rig->drain(); });
  EXPECT_NE(error.find("by int8: a) of step 1 failed: lost"), std::string::npos) << error;
}

}  // namespace
}  // namespace usbyte
