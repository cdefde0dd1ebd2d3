// SPDX-License-Identifier: Apache-2.0
// ByteComp: the decision tree, costs and timelines that are worked out by hand, and the policy.
#include "policy/espresso/select.h"
#include "policy/espresso/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr const char* kSigns = "efsignsgd";

std::vector<Strategy> strategies(const std::vector<std::string>& texts) {
  std::vector<Strategy> out;
  for (const std::string& text : texts) out.push_back(Strategy::parse(text));
  return out;
}

std::vector<std::string> texts(const std::vector<Strategy>& of) {
  std::vector<std::string> out;
  for (const Strategy& strategy : of) out.push_back(strategy.describe());
  return out;
}

CodecCosts costs(double encode_s, double decode_s) {
  CodecCosts out;
  for (const char* spec : {kSigns, "fp16", "signsgd"}) {
    out.by_spec[spec] = {{encode_s, 0}, {decode_s, 0}};
  }
  return out;
}

// One level of `ranks`; everything takes 1 s and 1 ms for a byte.
CompressionCluster flat(int ranks, std::optional<CodecCosts> gpu, std::optional<CodecCosts> cpu) {
  NetworkModel network{ranks, {{1, 1e-3}}};
  network.reduce_scatter = network.all_gather = {{1, 1e-3}};
  return CompressionCluster::of(network, std::move(gpu), std::move(cpu));
}

CompressionJob job(const std::vector<double>& ready_s, int64_t numel,
                   const std::string& codec = kSigns) {
  CompressionJob out;
  for (double time_s : ready_s) out.tensors.push_back({numel, DType::float32, time_s, 0, codec});
  return out;
}

TEST(ByteCompTree, Flat) {
  EXPECT_EQ(texts(decision_tree(flat(4, {}, {}))), (std::vector<std::string>{"AR", "RS AG"}));
  EXPECT_EQ(texts(decision_tree(flat(4, costs(1, 1), {}))),
            (std::vector<std::string>{"AR", "RS AG", "C[gpu] AR D[gpu]", "C[gpu] AG D[gpu]",
                                      "C[gpu] A2A D[gpu] AG", "C[gpu] A2A D[gpu] C[gpu] AG D[gpu]",
                                      "C[gpu] G D[gpu] B", "C[gpu] G D[gpu] C[gpu] B D[gpu]"}));
  EXPECT_EQ(decision_tree(flat(4, costs(1, 1), costs(1, 1))).size(), 2 + 4 * 4 + 2 * 16);
}

TEST(ByteCompTree, HierarchicalOnesAreAllDifferentAndReadable) {
  const auto cluster = CompressionCluster::thakur(4, 8, 0, 1, 0, 1, costs(1, 1), costs(1, 1));
  const std::vector<Strategy> tree = decision_tree(cluster);
  // Flat ones, and between first and second steps with 0, 2, 2 and 4 codecs.
  EXPECT_EQ(tree.size(), 50 * (1 + 2 * (1 + 4 + 4 + 16)));
  EXPECT_EQ(std::set<Strategy>(tree.begin(), tree.end()).size(), tree.size());
  for (const Strategy& strategy : tree) EXPECT_EQ(Strategy::parse(strategy.describe()), strategy);
  for (const char* text : {"RS | AR | AG", "R | C[cpu] AG D[gpu] | B",
                           "C[gpu] A2A D[cpu] | RS AG | C[cpu] AG D[gpu]"}) {
    EXPECT_EQ(std::count(tree.begin(), tree.end(), Strategy::parse(text)), 1) << text;
  }
  const auto mixed = std::find_if(tree.begin(), tree.end(), [](const Strategy& strategy) {
    return strategy.describe().starts_with("RS") && strategy.describe().ends_with(" B");
  });
  EXPECT_EQ(mixed, tree.end());
}

TEST(ByteCompTree, TextThatIsNone) {
  for (const char* text : {"", "AR ", "XX", "C AG D", "AR[gpu]", "C[tpu] AG D[gpu]", "RS | AG",
                           "RS | AR | AG | AG", "RS |  AR | AG"}) {
    EXPECT_THROW(Strategy::parse(text), UsageError) << text;
  }
}

TEST(ByteCompCosts, ByTheTextbook) {
  const LinkCosts link = LinkCosts::thakur(5, 2, 0.5);
  EXPECT_EQ(link.all_reduce, (AlphaBeta{16, 3.2}));
  for (const AlphaBeta& half : {link.reduce_scatter, link.all_gather, link.all_to_all}) {
    EXPECT_EQ(half, (AlphaBeta{8, 1.6}));
  }
  EXPECT_EQ(link.reduce, (AlphaBeta{6, 6}));
  EXPECT_EQ(link.broadcast, link.reduce);
  EXPECT_EQ(link.gather, (AlphaBeta{6, 1.6}));
  // A network with the same costs is the same.
  const LinkCosts same = LinkCosts::of(NetworkModel::ring(5, 2, 0.5));
  EXPECT_DOUBLE_EQ(same.broadcast.beta_s_per_byte, link.broadcast.beta_s_per_byte);
  EXPECT_DOUBLE_EQ(same.gather.alpha_s, link.gather.alpha_s);
  // Eight ranks of a node send what goes to others over one link.
  const auto cluster = CompressionCluster::thakur(4, 8, 0, 1, 0, 1, {}, {});
  EXPECT_DOUBLE_EQ(cluster.flat.all_to_all.beta_s_per_byte, 8 * 0.75);
  EXPECT_DOUBLE_EQ(cluster.flat.all_gather.beta_s_per_byte, 31.0 / 32);
}

TEST(ByteCompTimeline, OneLinkServesInOrderOfArrival) {
  // 4 s and 1 s of startup each; the second waits for the first.
  EXPECT_DOUBLE_EQ(iteration_s(job({10, 12}, 1000), flat(2, {}, {}), strategies({"AR", "AR"})), 20);
  EXPECT_DOUBLE_EQ(iteration_s(job({10, 18}, 1000), flat(2, {}, {}), strategies({"AR", "AR"})), 23);
  // RS of the first, RS of the second, which has arrived meanwhile, AG, AG.
  CompressionJob two = job({10, 12}, 1000);
  two.tensors[0].rest_s = 7;
  EXPECT_DOUBLE_EQ(iteration_s(two, flat(2, {}, {}), strategies({"RS AG", "RS AG"})), 32);
}

TEST(ByteCompTimeline, CodecsOnTheGpuDelayBackward) {
  const CompressionCluster cluster = flat(2, costs(2, 3), costs(2, 3));
  const double message_s = 1 + 2e-3 * static_cast<double>(make_codec(kSigns)->message_bytes(1000));
  ASSERT_LT(message_s, 2);
  // Encoded until 12, gathered, both messages decoded; the second is ready at 22 instead of 20,
  // and its AR begins then.
  EXPECT_DOUBLE_EQ(
      iteration_s(job({10, 20}, 1000), cluster, strategies({"C[gpu] AG D[cpu]", "AR"})), 27);
  EXPECT_DOUBLE_EQ(
      iteration_s(job({10, 20}, 1000), cluster, strategies({"C[cpu] AG D[cpu]", "AR"})), 25);
  // Decoding on the GPU comes between what backward does: only what is not begun waits for it.
  EXPECT_DOUBLE_EQ(
      iteration_s(job({10, 11, 20}, 1000), cluster, strategies({"C[cpu] AG D[gpu]", "AR", "AR"})),
      // AR from 12 + message_s on; decoding 6 s from 20, when backward ends.
      26);
  EXPECT_DOUBLE_EQ(iteration_s(job({10}, 1000), cluster, strategies({"C[gpu] AG D[gpu]"})),
                   12 + message_s + 6);
}

TEST(ByteCompTimeline, RanksOfANodeShareItsLink) {
  auto cluster = CompressionCluster::thakur(2, 4, 0, 1e30, 0, 1000, costs(0, 0), {});
  // All of 4000 B, once more than half of which leaves the node in either way.
  EXPECT_NEAR(iteration_s(job({1}, 1000), cluster, strategies({"RS | AR | AG"})), 1 + 4, 1e-9);
  EXPECT_NEAR(iteration_s(job({1}, 1000), cluster, strategies({"R | AR | B"})), 1 + 4, 1e-9);
  EXPECT_NEAR(iteration_s(job({1}, 1000), cluster, strategies({"AR"})), 1 + 7, 1e-9);
  const auto message = [](int64_t n) {
    return static_cast<double>(make_codec(kSigns)->message_bytes(n));
  };
  EXPECT_NEAR(iteration_s(job({1}, 1000), cluster, strategies({"RS | C[gpu] AG D[gpu] | AG"})),
              1 + 4 * message(250) * 1e-3, 1e-9);
  EXPECT_NEAR(iteration_s(job({1}, 1000), cluster,
                          strategies({"R | C[gpu] A2A D[gpu] C[gpu] AG D[gpu] | B"})),
              1 + 2 * message(500) * 1e-3, 1e-9);
}

TEST(ByteCompTimeline, WhatCannotBe) {
  const CompressionCluster cluster = flat(2, costs(1, 1), {});
  const auto refuses = [&](const CompressionJob& one, const char* text) {
    EXPECT_THROW(iteration_s(one, cluster, strategies({text})), UsageError) << text;
  };
  for (const char* text :
       {"AG", "RS", "C[gpu] AG", "C[gpu] D[gpu]", "C[cpu] AG D[cpu]", "RS | AR | AG",
        "C[gpu] AR D[gpu]", "B", "G", "R", "RS B", "D[gpu]", "C[gpu] RS D[gpu] AG", "AR C[gpu]",
        "AR AR", "RS AG AR", "C[gpu] C[gpu] AG D[gpu]"}) {
    refuses(job({1}, 1000), text);
  }
  const auto two_levels = CompressionCluster::thakur(2, 2, 0, 1, 0, 1, {}, {});
  EXPECT_THROW(iteration_s(job({1}, 1000), two_levels, strategies({"RS | RS | AG"})), UsageError);
  refuses(job({1}, 1000, "none"), "C[gpu] AG D[gpu]");
  refuses(job({1}, 1000, "fp16"), "C[gpu] AG D[gpu]");  // messages that add are reduced
  refuses(job({1}, 1000, "signsgd"), "C[gpu] A2A D[gpu] C[gpu] AG D[gpu]");
  EXPECT_GT(iteration_s(job({1}, 1000, "fp16"), cluster, strategies({"C[gpu] AR D[gpu]"})), 1);
  CompressionJob integers = job({1}, 1000);
  integers.tensors[0].dtype = DType::int8;
  refuses(integers, "C[gpu] AG D[gpu]");
  EXPECT_THROW(iteration_s(job({1, 2}, 1000), cluster, strategies({"AR"})), UsageError);
  EXPECT_THROW(iteration_s(job({2, 1}, 1000), cluster, strategies({"AR", "AR"})), UsageError);
}

TEST(ByteCompSelection, OnlyWhatIsExposedIsCompressed) {
  const CompressionCluster cluster = flat(2, costs(0.5, 0.5), {});
  // The first takes 5 s of the 20 until the last is ready: nothing to be gained there.
  const StrategySelection found = select_strategies(job({10, 30}, 1000), cluster);
  EXPECT_FALSE(found.strategies[0].compresses());
  EXPECT_TRUE(found.strategies[1].compresses()) << found.strategies[1].describe();
  EXPECT_DOUBLE_EQ(found.uncompressed_s, 35);
  EXPECT_LT(found.iteration_s, 34);
  EXPECT_EQ(found.iteration_s, iteration_s(job({10, 30}, 1000), cluster, found.strategies));
  // If it is not needed at once, neither is.
  CompressionJob late = job({10, 30}, 1000);
  late.tensors[1].rest_s = -5;
  EXPECT_FALSE(select_strategies(late, cluster).strategies[1].compresses());
}

TEST(ByteCompSelection, TheEarliestOfEqualOnesAreOffloaded) {
  // Each encoding on the GPU delays backward by 4 s; the CPU takes 9 s, which is too long for the
  // last of them.
  const CompressionCluster cluster = flat(2, costs(4, 0), costs(9, 0));
  const CompressionJob three = job({10, 20, 30}, 10000);
  const std::vector<Strategy> allowed = strategies({"AR", "C[gpu] AG D[gpu]", "C[cpu] AG D[cpu]"});
  const StrategySelection found = select_strategies(three, cluster, allowed);
  EXPECT_EQ(texts(found.strategies),
            (std::vector<std::string>{"C[cpu] AG D[cpu]", "C[cpu] AG D[cpu]", "C[gpu] AG D[gpu]"}));
  EXPECT_LT(found.offloaded_s, found.greedy_s);
}

TEST(ByteCompSelection, NothingToDo) {
  const CompressionCluster cluster = flat(2, costs(1, 1), {});
  CompressionJob none;
  none.rest_s = 3;
  EXPECT_EQ(select_strategies(none, cluster).iteration_s, 3);
  EXPECT_THROW(select_strategies(job({1}, 10, "none"), cluster, strategies({"C[gpu] AG D[gpu]"})),
               UsageError);
}

// Tensors of that many elements, each ready 1 s after the next.
Profile layers(const std::vector<int64_t>& numels) {
  Profile p;
  int64_t offset = 0;
  for (size_t i = 0; i < numels.size(); ++i) {
    p.tensors.push_back({"t" + std::to_string(i), numels[i], DType::float32, offset});
    offset += numels[i];
    p.need_s.push_back(0);
    p.ready_s.push_back(1 + static_cast<double>(numels.size() - i));
  }
  return p;
}

TEST(ByteCompPolicy, CompressesWhatPays) {
  const Profile p = layers({1'000'000, 10, 1'000'000});
  PolicyOptions options;
  options.codec_of = {kSigns, "onebit", "none"};
  options.codec_costs = costs(1e-3, 1e-3);
  options.codec_costs.by_spec["onebit"] = {{100, 0}, {100, 0}};
  const Plan plan = make_plan("bytecomp", p, NetworkModel::ring(4, 1e-4, 1e6), options);
  ASSERT_FALSE(plan.ops().empty());
  EXPECT_EQ(plan.policy(), "bytecomp");
  const auto codecs_of = [&](int tensor) {
    std::set<std::string> out;
    for (const Op& op : plan.ops()) {
      if (plan.tensors_of(op) == std::vector<int>{tensor}) out.insert(op.codec);
    }
    return out;
  };
  EXPECT_TRUE(codecs_of(0).contains(kSigns));
  EXPECT_EQ(codecs_of(1), std::set<std::string>{"none"});
  EXPECT_EQ(codecs_of(2), std::set<std::string>{"none"});
  EXPECT_EQ(plan.tensors_of(plan.ops().front()), std::vector<int>{2});  // as backward comes to it
}

TEST(ByteCompPolicy, EachFormOfCompressionIsAnOp) {
  // Two ranks gather messages; of 64, which would take 64 times as long to decode, each adds up a
  // part.
  const Profile p = layers({1'000'000});
  PolicyOptions options;
  options.codec_of = {kSigns};
  options.codec_costs.by_spec[kSigns] = {{0, 1e-9}, {0, 1e-9}};
  const auto kinds = [&](int ranks, const char* codec) {
    options.codec_of = {codec};
    std::vector<Collective> out;
    const Plan plan = make_plan("bytecomp", p, NetworkModel::ring(ranks, 1e-6, 1e6), options);
    for (const Op& op : plan.ops()) {
      EXPECT_EQ(op.codec, codec);
      out.push_back(op.kind);
    }
    return out;
  };
  EXPECT_EQ(kinds(2, kSigns), std::vector<Collective>{Collective::all_reduce});
  EXPECT_EQ(kinds(64, kSigns),
            (std::vector<Collective>{Collective::reduce_scatter, Collective::all_gather}));
  options.codec_costs = costs(1e-6, 1e-2);
  EXPECT_EQ(kinds(64, "fp16"), std::vector<Collective>{Collective::all_reduce});
}

TEST(ByteCompPolicy, CodingIsFreeUnlessItsCostIsKnown) {
  const Profile p = layers({1'000'000, 1'000'000});
  const NetworkModel network = NetworkModel::ring(4, 1e-4, 1e6);
  PolicyOptions options;
  options.codec_of = {kSigns, kSigns};
  const auto coded = [&] {
    const Plan plan = make_plan("bytecomp", p, network, options);
    return std::any_of(plan.ops().begin(), plan.ops().end(),
                       [](const Op& op) { return op.codec != "none"; });
  };
  EXPECT_TRUE(coded());
  options.codec_costs = costs(1000, 1000);
  EXPECT_FALSE(coded());
  options.codec_of = {"onebit", kSigns};
  EXPECT_THROW(coded(), UsageError);
  options.codec_of = {kSigns};
  EXPECT_THROW(coded(), UsageError);
}

TEST(ByteCompPolicy, TheSimulatorAgreesWithTheTimeline) {
  const Profile p = layers({3'000'000, 10, 1'000'000, 200'000});
  const NetworkModel network = NetworkModel::ring(4, 1e-3, 1e7);
  PolicyOptions options;
  options.overlap = Overlap::backward;
  options.codec_of = {kSigns, kSigns, "fp16", kSigns};
  options.codec_costs = costs(0.2, 0.1);
  const Plan plan = make_plan("bytecomp", p, network, options);
  const CompressionJob job = CompressionJob::of(p, options.overlap, options.codec_of);
  const auto cluster = CompressionCluster::of(network, {}, options.codec_costs);
  const std::vector<Strategy> executable =
      strategies({"AR", "RS AG", "C[cpu] AR D[cpu]", "C[cpu] AG D[cpu]", "C[cpu] A2A D[cpu] AG",
                  "C[cpu] A2A D[cpu] C[cpu] AG D[cpu]"});
  Simulator simulator(p, network, options.overlap, false, options.codec_costs);
  const double expected_s = select_strategies(job, cluster, executable).iteration_s;
  EXPECT_NEAR(simulator.step_s(plan), expected_s, 0.02 * expected_s);
}

TEST(ByteCompPolicy, AScatterThatTakesNoTimeComesBeforeItsGather) {
  const Profile p = layers({10, 10, 10});
  NetworkModel network{4, {{10, 0}}};
  network.reduce_scatter = {{0, 0}};
  for (double gather_s : {1e-12, 0.001, 0.01, 0.1, 0.7, 1.1}) {
    network.all_gather = {{gather_s, 0}};
    const Plan plan = make_plan("bytecomp", p, network);
    ASSERT_EQ(plan.ops().size(), 6u) << gather_s;
    EXPECT_EQ(plan.ops().front().kind, Collective::reduce_scatter) << gather_s;
  }
}

}  // namespace
}  // namespace usbyte
