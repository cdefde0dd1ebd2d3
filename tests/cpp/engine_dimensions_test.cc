// SPDX-License-Identifier: Apache-2.0
// Ops along dimensions of a mesh: what is coded is a shard of what a node has summed up.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "mesh_rig.h"
#include "plan/dimension_path.h"
#include "policy/transforms/routing.h"
#include "random_dimension_paths.h"
#include "usbyte/codec.h"
#include "usbyte/engine.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::communicators;
using test::mesh;
using test::message_of;
using test::on_each_rank;
using test::Random;
using test::random_lines;

constexpr int kSteps = 4;

float input(int rank, int step, int64_t element) {
  Random random(static_cast<uint64_t>(rank + 10 * step + 1000 * element));
  return static_cast<float>(random(-40, 40));
}

struct Outcome {
  std::vector<std::vector<float>> outputs;  // by step
  std::vector<float> codec_state;
};

// What each rank's flat buffer holds after each step, and what its codecs remember in the end.
std::vector<Outcome> run(const Plan& plan, const Topology& topology) {
  const auto meshes = communicators(topology);
  std::vector<Outcome> out(meshes.size());
  on_each_rank(topology.ranks(), [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    const auto numel = static_cast<size_t>(plan.numel());
    std::vector<float> flat_buffer(numel);
    out[at].codec_state.resize(3 * numel);
    EngineOptions options;
    options.codec_state = out[at].codec_state.data();
    Engine engine(plan, reinterpret_cast<std::byte*>(flat_buffer.data()), *meshes[at], options);
    for (int step = 0; step < kSteps; ++step) {
      engine.begin_step();
      for (size_t e = 0; e < numel; ++e)
        flat_buffer[e] = input(rank, step, static_cast<int64_t>(e));
      for (int t = 0; t < static_cast<int>(plan.tensors().size()); ++t) engine.ready(t);
      engine.end_backward();
      engine.drain();
      out[at].outputs.push_back(flat_buffer);
    }
  });
  return out;
}

TEST(EngineDimensions, WhatLosesNothingIsTheSum) {
  Random random(1);
  for (int i = 0; i < cases(24); ++i) {
    const Topology topology =
        mesh(test::kLineMeshes[static_cast<size_t>(i) % test::kLineMeshes.size()]);
    const Plan plan =
        random_lines(random, topology, {"topk:1", "fp16", "none"}, {"fp16", "topk:1,feedback=off"});
    for (const Outcome& rank : run(plan, topology)) {
      for (int step = 0; step < kSteps; ++step) {
        for (int64_t e = 0; e < plan.numel(); ++e) {
          float sum = 0;
          for (int r = 0; r < topology.ranks(); ++r) sum += input(r, step, e);
          ASSERT_EQ(rank.outputs[static_cast<size_t>(step)][static_cast<size_t>(e)], sum);
        }
      }
    }
  }
}

// Only who codes an element remembers what was not sent of it.
TEST(EngineDimensions, WhatIsNotSentIsRemembered) {
  Random random(2);
  for (int i = 0; i < cases(24); ++i) {
    const Topology topology =
        mesh(test::kLineMeshes[static_cast<size_t>(i) % test::kLineMeshes.size()]);
    const Plan plan =
        random_lines(random, topology, {"topk:0.3", "efsignsgd", "int8"}, {"topk:1,feedback=off"});
    const std::vector<Outcome> ranks = run(plan, topology);
    std::vector<int> codes(ranks.size() * static_cast<size_t>(plan.numel()));
    for (const Op& op : plan.ops()) {
      const auto codec = make_codec(op.codec);
      for (size_t r = 0; codec && codec->state_rows() > 0 && r < ranks.size(); ++r) {
        for (Block b : worked_on(op, &topology, static_cast<int>(r))) {
          for (int64_t e = b.begin; e < b.end; ++e) {
            codes[r * static_cast<size_t>(plan.numel()) + static_cast<size_t>(e)] = 1;
          }
        }
      }
    }
    for (size_t e = 0; e < static_cast<size_t>(plan.numel()); ++e) {
      double produced = 0, arrived = 0;
      for (int step = 0; step < kSteps; ++step) {
        arrived += ranks[0].outputs[static_cast<size_t>(step)][e];
        for (int r = 0; r < topology.ranks(); ++r) {
          produced += input(r, step, static_cast<int64_t>(e));
        }
      }
      for (size_t r = 0; r < ranks.size(); ++r) {
        arrived += ranks[r].codec_state[e];
        const bool is_its = codes[r * static_cast<size_t>(plan.numel()) + e] == 1;
        EXPECT_TRUE(is_its || ranks[r].codec_state[e] == 0);
      }
      ASSERT_NEAR(arrived, produced, 1e-3 * (1 + std::abs(produced)));
    }
  }
}

TEST(EngineDimensions, AllRanksHaveTheSameWhateverTheCodec) {
  Random random(3);
  const std::vector<std::string> codecs = {
      "fp16",    "bf16",   "fp8",      "int8",    "topk:0.2", "randk:0.3", "dct:0.2",
      "dgc:0.2", "qsgd:4", "terngrad", "signsgd", "signum",   "efsignsgd", "onebit"};
  for (int i = 0; i < cases(28); ++i) {
    const Topology topology =
        mesh(test::kLineMeshes[static_cast<size_t>(i) % test::kLineMeshes.size()]);
    const Plan plan = random_lines(random, topology, codecs, {"bf16", "topk:0.4,feedback=off"});
    const std::vector<Outcome> ranks = run(plan, topology);
    for (const Outcome& rank : ranks) ASSERT_EQ(rank.outputs, ranks[0].outputs);
    for (const auto& step : ranks[0].outputs) {
      for (float x : step) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

// What AdaTopK and exact gathers send is what is sent without the latter.
TEST(EngineDimensions, WhatIsPickedIsGatheredWhole) {
  Random random(5);
  int exact = 0;
  for (int i = 0; i < cases(24); ++i) {
    Topology topology = mesh(test::kLineMeshes[static_cast<size_t>(i) % test::kLineMeshes.size()]);
    for (Dimension& d : topology.dimensions) d.bytes_per_s = static_cast<double>(random(1, 20));
    const int64_t numel = random(1, 400);
    const std::string spec = random.one_in(2) ? "topk:0.02" : "dct:0.03";
    Op op{Collective::all_reduce, {{0, numel}}, std::numeric_limits<int64_t>::max()};
    op.codec = spec;
    const Plan plan("test", {{"w", numel, DType::float32, 0, 1, 0}}, {op});
    for (DimensionPath path : dimension_paths(op, topology)) {
      if (path.gather == "none") continue;
      ++exact;
      const auto along = [&] {
        return along_dimensions(plan, topology, std::vector<std::optional<DimensionPath>>{path});
      };
      const std::vector<Outcome> picked = run(along(), topology);
      path.gather = "none";
      const std::vector<Outcome> whole = run(along(), topology);
      for (size_t r = 0; r < whole.size(); ++r) {
        ASSERT_EQ(picked[r].outputs, whole[r].outputs);
        ASSERT_EQ(picked[r].codec_state, whole[r].codec_state);
      }
    }
  }
  EXPECT_GT(exact, 0);
}

TEST(EngineDimensions, CommunicatorsWithoutSuchADimensionAreRefused) {
  Random random(4);
  const Topology topology = mesh({2, 2});
  const Plan plan = random_lines(random, topology, {"fp16"}, {});
  std::vector<float> flat_buffer(static_cast<size_t>(plan.numel()));
  auto* const bytes = reinterpret_cast<std::byte*>(flat_buffer.data());
  auto flat = make_local_communicators(4);
  EXPECT_NE(
      message_of<UsageError>([&] { Engine(plan, bytes, *flat[0]); }).find("no such dimension"),
      std::string::npos);
  const auto cube = communicators(mesh({2, 2, 2}));
  EXPECT_NE(message_of<UsageError>([&] { Engine(plan, bytes, *cube[0]); }).find("all ranks"),
            std::string::npos);
  const auto one = communicators(mesh({4}));
  EXPECT_NE(message_of<UsageError>([&] { Engine(plan, bytes, *one[0]); }).find("no such dimension"),
            std::string::npos);
}

}  // namespace
}  // namespace usbyte
