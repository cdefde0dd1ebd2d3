// SPDX-License-Identifier: Apache-2.0
#include "usbyte/plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "random_plan.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

const std::vector<TensorSpec> kTwo = {{"a", 10, DType::float32, 0}, {"b", 6, DType::float32, 10}};

Op reduce(std::vector<Block> blocks) {
  return {Collective::all_reduce, std::move(blocks), 1 << 20, false};
}

std::string error_of(std::vector<TensorSpec> tensors, std::vector<Op> ops) {
  try {
    Plan("test", std::move(tensors), std::move(ops));
  } catch (const PlanError& e) {
    return e.what();
  }
  return "";
}

TEST(Plan, AcceptsCutsInsideAndAcrossTensors) {
  const Plan plan("test", kTwo, {reduce({{4, 13}}), reduce({{0, 4}, {13, 16}})});
  EXPECT_EQ(plan.numel(), 16);
  EXPECT_EQ(plan.flat_buffer_bytes(), 64);
  EXPECT_EQ(plan.tensors_of(plan.ops()[0]), (std::vector<int>{0, 1}));
  EXPECT_EQ(plan.bytes(plan.ops()[1]), 28);
  EXPECT_EQ(plan.describe(0), "op 0 (all_reduce, 36 B: a, b)");
}

TEST(Plan, RejectsWhatDoesNotTile) {
  EXPECT_NE(error_of(kTwo, {reduce({{0, 15}})}).find("[15, 16)"), std::string::npos);
  EXPECT_NE(error_of(kTwo, {reduce({{1, 16}})}).find("[0, 1)"), std::string::npos);
  EXPECT_NE(error_of(kTwo, {reduce({{0, 9}}), reduce({{8, 16}})}).find("twice"), std::string::npos);
  EXPECT_NE(error_of(kTwo, {reduce({{0, 17}})}).find("outside"), std::string::npos);
  EXPECT_NE(error_of(kTwo, {}).find("covered by no"), std::string::npos);
}

TEST(Plan, ScatterNeedsItsLaterGatherOfTheSameBlock) {
  const Op scatter{Collective::reduce_scatter, {{0, 16}}, 100, false};
  const Op gather{Collective::all_gather, {{0, 16}}, 100, false};
  const Op half{Collective::all_gather, {{0, 8}}, 100, false};
  EXPECT_EQ(error_of(kTwo, {scatter, gather}), "");
  EXPECT_NE(error_of(kTwo, {scatter}).find("never gathered"), std::string::npos);
  EXPECT_NE(error_of(kTwo, {gather, scatter}).find("not scattered"), std::string::npos);
  EXPECT_NE(error_of(kTwo, {scatter, half}).find("not scattered"), std::string::npos);
  EXPECT_NE(error_of(kTwo, {scatter, gather, gather}).find("twice"), std::string::npos);
}

const TensorSpec kSparse = {"s", 0, DType::float32, 16, 100, 8};

Op sparse_op(int tensor, const std::string& scheme = "zen") {
  Op op{Collective::sparse_all_reduce, {}, 1 << 20, false};
  op.sparse = {tensor, scheme, 5000};
  return op;
}

TEST(Plan, SparseTensorsTakeNoRoomAndHaveAnOpEach) {
  std::vector<TensorSpec> tensors = kTwo;
  tensors.push_back(kSparse);
  const Plan plan("test", tensors, {reduce({{0, 16}}), sparse_op(2)});
  EXPECT_EQ(plan.numel(), 16);
  EXPECT_EQ(plan.flat_buffer_bytes(), 64);
  EXPECT_EQ(plan.tensors_of(plan.ops()[0]), (std::vector<int>{0, 1}));
  EXPECT_EQ(plan.tensors_of(plan.ops()[1]), (std::vector<int>{2}));
  EXPECT_EQ(plan.bytes(plan.ops()[1]), 5000);
  EXPECT_EQ(plan.message_bytes(plan.ops()[1]), 5000);
  EXPECT_EQ(plan.traffic(plan.ops()[1], 4), std::pair(Collective::all_gather, int64_t{6666}));
  EXPECT_EQ(plan.describe(1), "op 1 (sparse_all_reduce, 5 kB by zen: s)");
  EXPECT_EQ(Plan::from_json(plan.to_json()), plan);
}

TEST(Plan, RejectsSparseOpsThatMakeNoSense) {
  std::vector<TensorSpec> tensors = kTwo;
  tensors.push_back(kSparse);
  const Op dense = reduce({{0, 16}});
  const auto expect = [&](std::vector<Op> ops, const char* what) {
    const std::string error = error_of(tensors, std::move(ops));
    EXPECT_NE(error.find(what), std::string::npos) << error;
  };
  expect({dense}, "'s' is sparse, and in 0 sparse_all_reduces");
  expect({dense, sparse_op(2), sparse_op(2)}, "in 2 sparse_all_reduces");
  expect({dense, sparse_op(2), sparse_op(0)}, "'a' is not sparse");
  expect({dense, sparse_op(3)}, "tensor 3, of 3");
  Op blocks = sparse_op(2), bare = sparse_op(2), kind = sparse_op(2), coded = sparse_op(2);
  blocks.blocks = {{0, 16}};
  bare.sparse.reset();
  kind.kind = Collective::all_reduce;
  coded.codec = "fp16";
  expect({dense, blocks}, "neither blocks nor a codec");
  expect({dense, coded}, "neither blocks nor a codec");
  expect({dense, bare}, "belongs to a sparse_all_reduce");
  expect({dense, kind}, "belongs to a sparse_all_reduce");
  EXPECT_THROW(Plan("test", tensors, {dense, sparse_op(2, "nez")}), UsageError);
  EXPECT_NE(error_of({kSparse}, {}), "");
  EXPECT_NE(error_of({{"s", 0, DType::float32, 0, 9, 8}, {"a", 16, DType::float32, 0}}, {dense})
                .find("'a' is behind a sparse one"),
            std::string::npos);
  EXPECT_NE(error_of({{"s", 4, DType::float32, 0, 2, 2}}, {}).find("elements in the flat buffer"),
            std::string::npos);
}

Op picked_op(const std::string& codec, const std::string& scheme) {
  Op op = reduce({{0, 16}});
  op.codec = codec;
  op.scheme = scheme;
  return op;
}

TEST(Plan, PickedElementsAreGatheredOrAddedUpByAScheme) {
  const Plan gathered("test", kTwo, {picked_op("topk:0.25", "")});
  const Plan summed("test", kTwo, {picked_op("topk:0.25", "zen")});
  EXPECT_EQ(gathered.to_json().find("scheme"), std::string::npos);
  EXPECT_NE(gathered.hash(), summed.hash());
  EXPECT_EQ(Plan::from_json(summed.to_json()), summed);
  EXPECT_EQ(summed.describe(0), "op 0 (all_reduce, 64 B by topk:0.25, zen: a, b)");
  const Op& op = summed.ops()[0];
  EXPECT_EQ(summed.message_bytes(op), 32);
  EXPECT_EQ(gathered.traffic(gathered.ops()[0], 4),
            std::pair(Collective::all_gather, int64_t{128}));
  // 4 of 16 are pushed, of 8 bytes each; 1 - 0.75^4 of 16 are pulled, of 4 bytes, with 2 of bits.
  const double pulled = (1 - std::pow(0.75, 4)) * 16 * 4 + 2;
  EXPECT_EQ(summed.traffic(op, 4),
            std::pair(Collective::all_gather, static_cast<int64_t>(32 + pulled)));
  EXPECT_EQ(summed.traffic(op, 1).second, 0);
}

TEST(Plan, RejectsSchemesThatMakeNoSense) {
  const auto expect = [&](Op op, const char* what) {
    const std::string error = error_of(kTwo, {std::move(op)});
    EXPECT_NE(error.find(what), std::string::npos) << error;
  };
  expect(picked_op("none", "zen"), "scheme zen is for an all_reduce with a codec that picks");
  expect(picked_op("randk:0.5", "zen"), "codec that picks elements");
  expect(picked_op("topk:0.5", "nez"), "op 0: unknown scheme 'nez'");
  Op scatter = picked_op("topk:0.5", "zen");
  scatter.kind = Collective::reduce_scatter;
  expect(scatter, "is for an all_reduce");
  auto json = nlohmann::json::parse(Plan("test", kTwo, {picked_op("topk:0.5", "zen")}).to_json());
  for (const nlohmann::json& wrong : {nlohmann::json(1), nlohmann::json(), nlohmann::json("nez")}) {
    json["ops"][0]["scheme"] = wrong;
    EXPECT_THROW(Plan::from_json(json.dump()), PlanError);
  }
}

TEST(Plan, RejectsBadTensorsAndOps) {
  const std::vector<Op> whole = {reduce({{0, 16}})};
  EXPECT_NE(error_of({{"a", 10, DType::float32, 0}, {"b", 6, DType::float32, 11}}, whole), "");
  EXPECT_NE(error_of({{"a", 10, DType::float32, 0}, {"a", 6, DType::float32, 10}}, whole), "");
  EXPECT_NE(error_of({{"a", 10, DType::float32, 0}, {"b", 6, DType::float64, 10}}, whole)
                .find("mixes dtypes"),
            std::string::npos);
  EXPECT_NE(error_of(kTwo, {{Collective::all_reduce, {{0, 16}}, 0, false}}), "");
  EXPECT_NE(error_of(kTwo, {{Collective::broadcast, {{0, 16}}, 1, false}}), "");
  EXPECT_NE(error_of(kTwo, {reduce({{0, 16}}), reduce({})}), "");
}

TEST(Plan, SegmentsOfAnotherDtypeAreAligned) {
  const Plan plan("test", {{"a", 3, DType::float32, 0}, {"b", 5, DType::float64, 3}},
                  {reduce({{0, 3}}), reduce({{3, 8}})});
  EXPECT_EQ(plan.byte_offset(2), 8);
  EXPECT_EQ(plan.byte_offset(3), 256);
  EXPECT_EQ(plan.byte_offset(7), 256 + 32);
  EXPECT_EQ(plan.flat_buffer_bytes(), 256 + 40);
}

TEST(Plan, JsonRoundTripsAndHashesAreStable) {
  std::mt19937 rng(1);
  for (int i = 0; i < 200; ++i) {
    const Plan plan = random_plan(rng);
    const Plan again = Plan::from_json(plan.to_json());
    EXPECT_EQ(again, plan);
    EXPECT_EQ(again.hash(), plan.hash());
  }
  const Plan plan("test", kTwo, {reduce({{0, 16}})});
  EXPECT_EQ(
      plan.to_json(),
      R"({"format":"usbyte-plan-1","policy":"test","tensors":[)"
      R"({"name":"a","numel":10,"dtype":"float32"},{"name":"b","numel":6,"dtype":"float32"}],)"
      R"("ops":[{"kind":"all_reduce","blocks":[[0,16]],"window_bytes":1048576,"fence":false}]})");
  EXPECT_NE(plan.hash(), Plan("test", kTwo, {reduce({{0, 8}}), reduce({{8, 16}})}).hash());
}

TEST(Plan, BrokenJsonIsAPlanError) {
  const std::string good = Plan("test", kTwo, {reduce({{0, 16}})}).to_json();
  for (size_t cut = 0; cut < good.size(); ++cut) {
    EXPECT_THROW(Plan::from_json(good.substr(0, cut)), PlanError);
  }
  for (const char* key : {"format", "policy", "tensors", "ops"}) {
    auto json = nlohmann::json::parse(good);
    json.erase(key);
    EXPECT_THROW(Plan::from_json(json.dump()), PlanError) << key;
    json[key] = nullptr;
    EXPECT_THROW(Plan::from_json(json.dump()), PlanError) << key;
  }
}

TEST(Shard, RangesTileTheBlockForAnySize) {
  for (int64_t n : {0, 1, 2, 3, 7, 8, 100}) {
    for (int size = 1; size <= 9; ++size) {
      int64_t at = 5;
      for (int rank = 0; rank < size; ++rank) {
        const Block part = shard({5, 5 + n}, rank, size);
        EXPECT_EQ(part.begin, at);
        at = part.end;
      }
      EXPECT_EQ(at, 5 + n);
    }
  }
}

}  // namespace
}  // namespace usbyte
