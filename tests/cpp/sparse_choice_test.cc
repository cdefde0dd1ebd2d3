// SPDX-License-Identifier: Apache-2.0
#include "policy/transforms/sparse_choice.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ranks.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

const SparseShape kWords{400'000, 128, DType::float32};

std::string first(const NetworkModel& network, const SparseShape& shape, double one, double all) {
  return sparse_choices(network, shape, one, all).front().scheme;
}

TEST(SparseChoice, DensitiesGrowAsAPower) {
  const SparseDensity density = grown_density(8, 0.01, 0.04);
  EXPECT_NEAR(density.of(1), 0.01, 1e-12);
  EXPECT_NEAR(density.of(8), 0.04, 1e-12);
  EXPECT_NEAR(density.of(4) / density.of(2), density.of(2) / density.of(1), 1e-9);
  EXPECT_NEAR(grown_density(4, 0, 0.02).of(1), 0.005, 1e-12);
  EXPECT_EQ(grown_density(4, 0, 0).of(4), 0);
}

TEST(SparseChoice, IsWhatTheFormulasSay) {
  // Without startups, bytes alone count: 1 byte/s.
  const NetworkModel four = NetworkModel::ring(4, 0, 1), sixteen = NetworkModel::ring(16, 0, 1);
  // Much in common: 3 / 4 (1 + 1.2) is less than 1 + 1.1; little: 3 / 4 (1 + 3) is more than 1
  // + 1.7.
  EXPECT_EQ(first(four, kWords, 0.02, 0.024), "zen");
  EXPECT_EQ(first(four, kWords, 0.02, 0.06), "hierarchical");
  EXPECT_EQ(first(sixteen, kWords, 0.02, 0.1), "zen");
  for (const SparseChoice& choice : sparse_choices(four, kWords, 0.02, 0.06)) {
    EXPECT_NEAR(choice.seconds, static_cast<double>(choice.bytes), 1 + 1e-6 * choice.seconds);
    EXPECT_TRUE(sparse_scheme(choice.scheme).keeps_zeros);
    EXPECT_NE(choice.scheme, "sparse_ps");
  }
  // Next to no bytes: the fewest transfers.
  EXPECT_EQ(first(NetworkModel::ring(16, 1e-3, 1e9), kWords, 1e-6, 1e-5), "agsparse");
}

TEST(SparseChoice, BytesAreThoseOfTheFormula) {
  const NetworkModel network = NetworkModel::ring(4, 1e-4, 125e6);
  for (const SparseChoice& choice : sparse_choices(network, kWords, 0.02, 0.06)) {
    const SparseScheme& scheme = sparse_scheme(choice.scheme);
    const double bytes = scheme.bytes(4, kWords, grown_density(4, 0.02, 0.06));
    EXPECT_NEAR(static_cast<double>(choice.bytes), bytes, 1);
    EXPECT_NEAR(choice.seconds, scheme.transfers(4) * 1e-4 + bytes / 125e6, 1e-9);
  }
}

TEST(SparseChoice, ASingleRankSendsNothing) {
  for (const SparseChoice& choice : sparse_choices(NetworkModel::ring(1, 0, 1), kWords, 0.1, 0.1)) {
    EXPECT_EQ(choice.bytes, 0);
  }
}

Plan picks(const std::string& codec) {
  constexpr int64_t kNumel = 10'000'000;
  return {"test",
          {{"a", kNumel, DType::float32, 0}},
          {{Collective::all_reduce, {{0, kNumel}}, 1 << 20, false, codec}}};
}

CodecCosts free_of(const std::string& codec) {
  return codec == "none" ? CodecCosts() : CodecCosts{{{make_codec(codec)->spec(), {}}}};
}

TEST(SparseChoice, WhatIsPickedIsAddedUpWhereThatIsClearlyFaster) {
  const auto scheme = [](const std::string& codec, const NetworkModel& network) {
    const Plan plan = with_schemes(picks(codec), network, free_of(codec));
    EXPECT_EQ(with_schemes(plan, network, free_of(codec)), plan);
    return plan.ops()[0].scheme;
  };
  const auto fast = [](int ranks) { return NetworkModel::ring(ranks, 0, 1e9); };
  for (int ranks : {1, 2, 4}) EXPECT_EQ(scheme("topk:0.01", fast(ranks)), "") << ranks;
  EXPECT_EQ(scheme("topk:0.01", NetworkModel::ring(1, 1e-3, 1e9)), "");
  for (int ranks : {8, 16, 64}) EXPECT_EQ(scheme("topk:0.01", fast(ranks)), "zen") << ranks;
  EXPECT_EQ(scheme("dgc:0.01", fast(8)), "zen");
  EXPECT_EQ(scheme("dct:0.01", fast(8)), "zen");
  EXPECT_EQ(scheme("randk:0.01", fast(8)), "");
  EXPECT_EQ(scheme("int8", fast(8)), "");
  EXPECT_EQ(scheme("none", fast(8)), "");
  // Transfers that follow each other take longer than what they save.
  EXPECT_EQ(scheme("topk:0.01", NetworkModel::ring(8, 0.1, 1e9)), "");
}

TEST(SparseChoice, AddingUpTakesTimeToo) {
  // 10 million elements at 1 GB/s: gathering takes 5.6 ms, zen about 4.5 for 970,000 rows.
  const NetworkModel network = NetworkModel::ring(8, 0, 1e9);
  CodecCosts costs = free_of("topk:0.01");
  costs.row_s = 0.1e-9;
  EXPECT_EQ(with_schemes(picks("topk:0.01"), network, costs).ops()[0].scheme, "zen");
  costs.row_s = 10e-9;
  EXPECT_EQ(with_schemes(picks("topk:0.01"), network, costs).ops()[0].scheme, "");
  // Gathered, eight messages are decoded; else one sum.
  costs.by_spec.begin()->second.decode = {0, 1e-9};
  EXPECT_EQ(with_schemes(picks("topk:0.01"), network, costs).ops()[0].scheme, "zen");
  EXPECT_GT(measure_row_s(0), 0);
}

TEST(SparseChoice, AnAllGatherThatWasMeasuredToBeFastIsKept) {
  NetworkModel network = NetworkModel::ring(8, 0, 1e9);
  network.all_gather = {{0, 0.5e-9}};
  EXPECT_EQ(with_schemes(picks("topk:0.01"), network, free_of("topk:0.01")), picks("topk:0.01"));
}

TEST(SparseChoice, ASchemeThatAnOpHasStays) {
  std::vector<Op> ops = picks("topk:0.01").ops();
  ops[0].scheme = "sparse_ps";
  const Plan plan = picks("topk:0.01").with_ops("test", ops);
  EXPECT_EQ(with_schemes(plan, NetworkModel::ring(64, 0, 1e9), free_of("topk:0.01")), plan);
}

TEST(SparseChoice, IndependentDrawsOverlapAsChanceHasIt) {
  const SparseDensity density = independent_density(3, 0.1);
  EXPECT_NEAR(density.of(1), 0.1, 1e-12);
  EXPECT_NEAR(density.of(3), 1 - 0.9 * 0.9 * 0.9, 1e-12);
}

TEST(SparseChoice, DensitiesThatCannotBeAreErrors) {
  const NetworkModel network = NetworkModel::ring(4, 0, 1);
  EXPECT_THROW(sparse_choices(network, kWords, 0.5, 0.4), UsageError);
  EXPECT_THROW(sparse_choices(network, kWords, 0.5, 1.1), UsageError);
  EXPECT_THROW(sparse_choices(network, kWords, std::nan(""), 0.1), UsageError);
}

}  // namespace
}  // namespace usbyte
