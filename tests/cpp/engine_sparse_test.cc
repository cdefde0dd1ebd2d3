// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "comm/local_communicator.h"
#include "engine_rig.h"
#include "sparse_rig.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Random;
using test::Rows;

constexpr int64_t kNumel = 1000;

// A dense tensor in two ops, and two sparse ones by different schemes, one of which goes first.
Plan plan_of(const std::string& scheme) {
  const std::vector<TensorSpec> tensors = {{"dense", kNumel, DType::float32, 0},
                                           {"words", 0, DType::float32, kNumel, 50, 4},
                                           {"more", 0, DType::float64, kNumel, 9, 1}};
  const auto sparse = [](int tensor, const std::string& by) {
    Op op{Collective::sparse_all_reduce, {}, test::kUnlimited, false};
    op.sparse = {tensor, by, 100};
    return op;
  };
  return Plan("test", tensors,
              {sparse(1, scheme),
               {Collective::all_reduce, {{0, 600}}, test::kUnlimited, false},
               sparse(2, "zen"),
               {Collective::all_reduce, {{600, kNumel}}, 400, true}});
}

SparseShape shape_of(const Plan& plan, int tensor) {
  const TensorSpec& t = plan.tensors()[static_cast<size_t>(tensor)];
  return {t.rows, t.width, t.dtype};
}

Rows rows_of(const SparseShape& shape, int rank, int step) {
  Random random(static_cast<uint64_t>(100 * rank + step));
  Rows out;
  for (int64_t i = random(0, 20); i > 0; --i) out.ids.push_back(random(0, shape.rows - 1));
  for (size_t i = 0; i < out.ids.size() * static_cast<size_t>(shape.width); ++i) {
    out.values.push_back(static_cast<double>(random(1, 9)));
  }
  return out;
}

TEST(EngineSparse, SumsBesideDenseOpsStepAfterStep) {
  for (int size : {1, 2, 4}) {
    auto communicators = make_local_communicators(size);
    auto exchanges = make_local_exchanges(size);
    on_each_rank(size, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      const Plan plan = plan_of("agsparse");
      std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
      auto* const dense = reinterpret_cast<float*>(flat_buffer.data());
      EngineOptions options;
      options.exchange = std::move(exchanges[r]);
      options.scale = 0.5;
      Engine engine(plan, flat_buffer.data(), *communicators[r], options);
      for (int step = 0; step < 30; ++step) {
        engine.begin_step();
        std::vector<Rows> mine(3);
        std::vector<Buffer> values(3);
        for (int tensor : {1, 2}) {
          const auto t = static_cast<size_t>(tensor);
          mine[t] = rows_of(shape_of(plan, tensor), rank, step);
          values[t] = test::packed(shape_of(plan, tensor), mine[t]);
          engine.ready_rows(tensor, {mine[t].ids, values[t].data()});
        }
        std::fill_n(dense, kNumel, static_cast<float>(rank + step));
        engine.ready(0);
        engine.end_backward();
        for (int tensor : {2, 1}) {
          engine.wait(tensor);
          const SparseSum sum = engine.take_rows(tensor);
          std::vector<Rows> all;
          for (int other = 0; other < size; ++other) {
            all.push_back(rows_of(shape_of(plan, tensor), other, step));
          }
          const SparseShape shape = shape_of(plan, tensor);
          test::expect_rows(shape, sum.rows, test::reference(shape, all), 0.5);
          const std::string again = message_of<UsageError>([&] { engine.take_rows(tensor); });
          EXPECT_NE(again.find("has been taken"), std::string::npos) << again;
        }
        engine.drain();
        const float want = static_cast<float>(size * step + size * (size - 1) / 2);
        ASSERT_EQ(std::count(dense, dense + kNumel, want), kNumel);
      }
    });
  }
}

TEST(EngineSparse, WrongCallsAreErrors) {
  auto communicator = std::move(make_local_communicators(1)[0]);
  const Plan plan = plan_of("zen");
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  EXPECT_NE(message_of<UsageError>([&] {
              Engine(plan, flat_buffer.data(), *communicator);
            }).find("needs an exchange"),
            std::string::npos);
  EngineOptions options;
  options.exchange = std::move(make_local_exchanges(1)[0]);
  Engine engine(plan, flat_buffer.data(), *communicator, options);
  engine.begin_step();
  EXPECT_NE(message_of<UsageError>([&] { engine.ready(1); }).find("'words' is sparse"),
            std::string::npos);
  EXPECT_NE(message_of<UsageError>([&] { engine.ready_rows(0, {}); }).find("'dense' is not sparse"),
            std::string::npos);
  engine.ready_rows(1, {});
  EXPECT_NE(message_of<UsageError>([&] { engine.ready_rows(1, {}); }).find("twice"),
            std::string::npos);
  EXPECT_THROW(engine.take_rows(2), UsageError);
  engine.ready_rows(2, {});
  engine.ready(0);
  engine.end_backward();
  engine.drain();
  EXPECT_EQ(engine.take_rows(2).rows.count(), 0);
}

// One rank's rows are impossible: the others wait for it in vain until they are told.
TEST(EngineSparse, AFaultEndsTheRanksThatWaitInsideAnExchange) {
  constexpr int kRanks = 3;
  const Plan plan = plan_of("zen");
  // Ranks that have not failed yet may still be adding up those of the others.
  std::vector<std::vector<std::byte>> flat_buffers(
      kRanks, std::vector<std::byte>(static_cast<size_t>(plan.flat_buffer_bytes())));
  auto communicators = make_local_communicators(kRanks);
  auto exchanges = make_local_exchanges(kRanks);
  on_each_rank(kRanks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const int64_t id = rank == 1 ? 50 : 3;
    const std::vector<float> row(4, 1.0F);
    EngineOptions options;
    options.exchange = std::move(exchanges[r]);
    Engine engine(plan, flat_buffers[r].data(), *communicators[r], options);
    const std::string what = message_of<FaultError>([&] {
      engine.begin_step();
      engine.ready_rows(1, {std::span(&id, 1), reinterpret_cast<const std::byte*>(row.data())});
      engine.ready_rows(2, {});
      engine.ready(0);
      engine.end_backward();
      engine.wait(1);
    });
    EXPECT_NE(what.find("sparse_all_reduce"), std::string::npos) << what;
    EXPECT_NE(what.find(rank == 1 ? "row 50 is outside" : "exchange"), std::string::npos) << what;
  });
}

TEST(EngineSparse, AnEngineThatFailsLetsGoOfAnExchange) {
  auto communicators = make_local_communicators(2);
  auto exchanges = make_local_exchanges(2);
  const Plan plan = plan_of("zen");
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  EngineOptions options;
  options.exchange = std::move(exchanges[0]);
  Engine engine(plan, flat_buffer.data(), *communicators[0], options);
  engine.begin_step();
  engine.ready_rows(1, {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engine.fail("elsewhere");
  EXPECT_EQ(message_of<FaultError>([&] { engine.wait(1); }), "elsewhere");
}

}  // namespace
}  // namespace usbyte
