// SPDX-License-Identifier: Apache-2.0
// What codecs pick, added up by schemes: the same as if messages were gathered.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "coded_plan.h"
#include "comm/local_communicator.h"
#include "engine_rig.h"
#include "sparse_rig.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Random;

constexpr int64_t kSteps = 4;

// Thirds, whose sums depend on their order.
float gradient(int rank, int64_t step, int64_t element) {
  return test::coded_gradient(rank, step, element) / 3;
}

struct Trained {
  std::vector<std::vector<float>> flat_buffers;  // after each step
  std::vector<float> codec_state;
};

std::vector<Trained> train(const Plan& plan, int size, uint64_t seed) {
  std::vector<Trained> out(static_cast<size_t>(size));
  auto communicators = make_local_communicators(size, {seed % 2 ? 1e-4 : 0, 0});
  const auto exchanges = test::shared_exchanges(size);
  on_each_rank(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
    out[r].codec_state.resize(static_cast<size_t>(2 * plan.numel()));
    EngineOptions options;
    options.stall_limit_s = 60;
    options.codec_state = out[r].codec_state.data();
    options.seed = seed;
    options.scale = 0.5;  // is for other gradients
    options.exchange = exchanges[r];
    Engine engine(plan, flat_buffer.data(), *communicators[r], options);
    for (int64_t step = 1; step <= kSteps; ++step) {
      engine.begin_step();
      for (size_t t = plan.tensors().size(); t-- > 0;) {
        const TensorSpec& tensor = plan.tensors()[t];
        for (int64_t e = tensor.offset; e < tensor.end(); ++e) {
          test::put(plan, flat_buffer.data(), e, gradient(rank, step, e));
        }
        engine.ready(static_cast<int>(t));
      }
      engine.end_backward();
      engine.drain();
      out[r].flat_buffers.emplace_back();
      for (int64_t e = 0; e < plan.numel(); ++e) {
        out[r].flat_buffers.back().push_back(test::get(plan, flat_buffer.data(), e));
      }
    }
  });
  return out;
}

class PickedPlans : public testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Engine, PickedPlans, testing::Range<uint64_t>(0, 40));

TEST_P(PickedPlans, SumsAreThoseOfGatheredMessages) {
  const uint64_t seed = GetParam();
  Random random(seed);
  std::vector<TensorSpec> tensors = random_tensors(random.engine(), false);
  constexpr DType kTypes[] = {DType::float32, DType::float64, DType::float16};
  for (TensorSpec& t : tensors) t.dtype = kTypes[&t < &tensors[tensors.size() / 2] ? 0 : seed % 3];
  std::vector<std::string> codecs;
  for (size_t i = 0; i < tensors.size(); ++i) {
    constexpr const char* kSpecs[] = {"topk:0.3", "dgc:0.3", "dct:0.3", "topk:0.1,feedback=off",
                                      "none"};
    codecs.emplace_back(kSpecs[random(0, std::ssize(kSpecs) - 1)]);
  }
  const Plan gathered = with_codecs(random_plan(random.engine(), tensors), codecs);
  const Plan summed = test::with_random_schemes(gathered, random);
  const int size = static_cast<int>(1 + seed % 5);
  const std::vector<Trained> want = train(gathered, size, seed), got = train(summed, size, seed);
  for (size_t r = 0; r < want.size(); ++r) {
    EXPECT_EQ(got[r].codec_state, want[r].codec_state);
    for (size_t step = 0; step < kSteps; ++step) {
      for (const Op& op : gathered.ops()) {
        if (op.codec == "none") continue;  // the network adds up in an order of its own
        for (Block b : op.blocks) {
          for (auto e = static_cast<size_t>(b.begin); e < static_cast<size_t>(b.end); ++e) {
            ASSERT_EQ(got[r].flat_buffers[step][e], want[r].flat_buffers[step][e]) << op.codec;
          }
        }
      }
    }
  }
}

Plan two_ops(const std::string& scheme) {
  Op first{Collective::all_reduce, {{0, 64}}, 100, false, "topk:0.25"};
  first.scheme = scheme;
  return Plan("test", {{"a", 64, DType::float32, 0}, {"b", 8, DType::float32, 64}},
              {first, {Collective::all_reduce, {{64, 72}}, 100, true}});
}

void step(Engine& engine) {
  engine.begin_step();
  for (int tensor : engine.unready()) engine.ready(tensor);
  engine.end_backward();
}

TEST(EnginePicks, NeedAnExchange) {
  test::Rig rig(test::plan_of(1));
  std::vector<float> flat_buffer(72), codec_state(72);
  EngineOptions options;
  options.codec_state = codec_state.data();
  const std::string error = message_of<UsageError>([&] {
    Engine(two_ops("zen"), reinterpret_cast<std::byte*>(flat_buffer.data()), rig.communicator,
           options);
  });
  EXPECT_NE(error.find("needs an exchange"), std::string::npos) << error;
}

TEST(EnginePicks, TheTimelineTellsOfThem) {
  const std::string path = testing::TempDir() + "usbyte_picks_" + std::to_string(getpid());
  auto communicator = std::move(make_local_communicators(1)[0]);
  std::vector<float> flat_buffer(72, 1), codec_state(72);
  EngineOptions options;
  options.codec_state = codec_state.data();
  options.exchange = std::move(make_local_exchanges(1)[0]);
  {
    Engine engine(two_ops("zen"), reinterpret_cast<std::byte*>(flat_buffer.data()), *communicator,
                  options);
    engine.set_timelines({std::make_shared<TimelineWriter>(path, 0, StepRange::parse("0:9"))});
    step(engine);
    engine.drain();
    EXPECT_EQ(std::count(flat_buffer.begin(), flat_buffer.begin() + 64, 1.0F), 16);
  }
  std::ifstream in(path);
  int told = 0;
  for (const auto& e : nlohmann::json::parse(in)) {
    if (e.at("ph") != "X" || !e.at("args").contains("sum_rows")) continue;
    ++told;
    EXPECT_EQ(e.at("args").at("sum_rows"), 16);
    EXPECT_EQ(e.at("args").at("density"), 0.25);
  }
  std::filesystem::remove(path);
  EXPECT_EQ(told, 1);
}

TEST(EnginePicks, ARankThatIsLostIsAFaultThatNamesTheOp) {
  constexpr int kRanks = 3;
  auto communicators = make_local_communicators(kRanks);
  auto exchanges = make_local_exchanges(kRanks);
  on_each_rank(kRanks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const Plan plan = two_ops("zen");
    std::vector<float> flat_buffer(72, 1), codec_state(72);
    EngineOptions options;
    options.codec_state = codec_state.data();
    options.exchange = std::move(exchanges[r]);
    Engine engine(plan, reinterpret_cast<std::byte*>(flat_buffer.data()), *communicators[r],
                  options);
    if (rank == 1) return engine.fail("gone");  // and its exchange with it
    const std::string error = message_of<FaultError>([&] {
      step(engine);
      engine.wait(0);
    });
    EXPECT_NE(error.find("by topk:0.25, zen: a) of step 1 failed"), std::string::npos) << error;
  });
}

}  // namespace
}  // namespace usbyte
