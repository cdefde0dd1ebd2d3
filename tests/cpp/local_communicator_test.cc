// SPDX-License-Identifier: Apache-2.0
#include "comm/local_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>

#include "ranks.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Pending;
using test::Random;
using Communicators = std::vector<std::unique_ptr<Communicator>>;
using Bytes = std::vector<std::byte>;

TEST(LocalCommunicator, RefusesUnusableSizesAndCosts) {
  EXPECT_NE(message_of<UsageError>([] { make_local_communicators(0); }).find("size 0"),
            std::string::npos);
  EXPECT_THROW(make_local_communicators(2, {-1, 0}), UsageError);
  EXPECT_THROW(make_local_communicators(2, {0, std::nan("")}), UsageError);
}

TEST(LocalCommunicator, OneRankCompletesInLaunch) {
  Communicators ranks = make_local_communicators(1);
  float value = 3;
  int calls = 0;
  for (Collective kind : {Collective::all_reduce, Collective::all_gather, Collective::barrier}) {
    ranks[0]->launch({kind, DType::float32, ReduceOp::sum, 0, {}, {{&value, 1}}},
                     [&, caller = std::this_thread::get_id()](std::exception_ptr error) {
                       EXPECT_FALSE(error);
                       EXPECT_EQ(std::this_thread::get_id(), caller);
                       ++calls;
                     });
  }
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(value, 3);
}

struct Odd {
  const char* what;
  std::function<void(Request&)> change;
  Collective kind = Collective::all_reduce;
};

TEST(LocalCommunicator, DifferingRequestsFailOnEveryRankAndNameTheRank) {
  const std::vector<Odd> odds = {
      {"collective all_gather", [](Request& r) { r.kind = Collective::all_gather; }},
      {"dtype int32", [](Request& r) { r.dtype = DType::int32; }},
      {"reduction max", [](Request& r) { r.reduce = ReduceOp::max; }},
      {"root 1", [](Request& r) { r.root = 1; }, Collective::broadcast},
      {"counts [5, 8]", [](Request& r) { r.recv[0].count = 5; }},
      {"counts [6]", [](Request& r) { r.recv.pop_back(); }},
      {"send counts [3]",
       [](Request& r) {
         r.recv.resize(1);
         r.send = {{r.recv[0].data, 3}};
       },
       Collective::all_to_all}};
  constexpr int kSize = 3;
  for (const Odd& odd : odds) {
    Communicators ranks = make_local_communicators(kSize);
    on_each_rank(kSize, [&](int rank) {
      Communicator& mine = *ranks[static_cast<size_t>(rank)];
      std::vector<float> data(14, 1.0F);
      Request request{
          odd.kind, DType::float32, ReduceOp::sum, 0, {}, {{data.data(), 6}, {data.data() + 6, 8}}};
      if (odd.kind == Collective::all_to_all) {
        request.recv.resize(1);
        request.send = request.recv;
      }
      if (rank == 2) odd.change(request);
      const std::string message = message_of<MismatchError>([&] { mine.run(request); });
      EXPECT_NE(message.find("rank 2"), std::string::npos) << message;
      EXPECT_NE(message.find(odd.what), std::string::npos) << message;
      EXPECT_NE(message.find("call 0"), std::string::npos) << message;
      // The ranks are still in step.
      float one = 1;
      mine.run({Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {{&one, 1}}});
      EXPECT_EQ(one, kSize);
    });
  }
}

TEST(LocalCommunicator, FieldsThatACollectiveIgnoresMayDiffer) {
  Communicators ranks = make_local_communicators(2);
  on_each_rank(2, [&](int rank) {
    float value = static_cast<float>(rank + 1);
    Communicator& mine = *ranks[static_cast<size_t>(rank)];
    const auto reduce = rank ? ReduceOp::max : ReduceOp::sum;
    mine.run({Collective::barrier, rank ? DType::int8 : DType::float32, reduce, rank, {}, {}});
    mine.run({Collective::broadcast, DType::float32, reduce, 1, {}, {{&value, 1}}});
    EXPECT_EQ(value, 2);
    mine.run({Collective::all_reduce, DType::float32, ReduceOp::sum, rank, {}, {{&value, 1}}});
    EXPECT_EQ(value, 4);
  });
}

TEST(LocalCommunicator, ImpossibleRequestsAreUsageErrorsOnEveryRank) {
  std::vector<float> data(16);
  const BufferView span{data.data(), 8};
  const std::vector<std::pair<const char*, Request>> requests = {
      {"all_reduce of int8", {Collective::all_reduce, DType::int8, {}, 0, {}, {span}}},
      {"reduce_scatter of uint8", {Collective::reduce_scatter, DType::uint8, {}, 0, {}, {span}}},
      {"root 7", {Collective::broadcast, DType::uint8, {}, 7, {}, {span}}},
      {"root -1", {Collective::broadcast, DType::uint8, {}, -1, {}, {span}}},
      {"no memory", {Collective::all_gather, DType::uint8, {}, 0, {}, {{nullptr, 8}}}},
      {"-4 is negative", {Collective::all_gather, DType::uint8, {}, 0, {}, {{&data, -4}}}},
      {"equal counts", {Collective::all_to_all, DType::uint8, {}, 0, {}, {span}}},
      {"send [8, 8]", {Collective::all_to_all, DType::uint8, {}, 0, {span, span}, {span}}}};
  for (int size : {1, 3}) {
    Communicators ranks = make_local_communicators(size);
    on_each_rank(size, [&](int rank) {
      for (const auto& [what, request] : requests) {
        const std::string message =
            message_of<UsageError>([&, &r = request] { ranks[static_cast<size_t>(rank)]->run(r); });
        EXPECT_NE(message.find(what), std::string::npos) << message;
      }
    });
  }
  Communicators ranks = make_local_communicators(3);
  on_each_rank(3, [&](int rank) {
    const Request request{Collective::all_to_all, DType::uint8, {}, 0, {span}, {span}};
    const std::string message =
        message_of<UsageError>([&] { ranks[static_cast<size_t>(rank)]->run(request); });
    EXPECT_NE(message.find("multiple of the 3 ranks"), std::string::npos) << message;
  });
}

TEST(LocalCommunicator, ThreadsOfOneRankMayLaunchTogether) {
  constexpr int kSize = 3, kThreads = 4, kCalls = 50;
  Communicators ranks = make_local_communicators(kSize);
  on_each_rank(kSize * kThreads, [&](int thread) {
    Communicator& mine = *ranks[static_cast<size_t>(thread % kSize)];
    for (int i = 0; i < kCalls; ++i) {
      // Which threads meet is open; whoever it is, the ranks' values are these.
      int64_t value = 1 + mine.rank();
      mine.run({Collective::all_reduce, DType::int64, ReduceOp::sum, 0, {}, {{&value, 1}}});
      EXPECT_EQ(value, 1 + 2 + 3);
    }
  });
}

// Completions run without a lock, so they may launch.
TEST(LocalCommunicator, CompletionsMayLaunchTheNextCall) {
  constexpr int kSize = 4, kCalls = 500;
  Communicators ranks = make_local_communicators(kSize);
  on_each_rank(kSize, [&](int rank) {
    Communicator& mine = *ranks[static_cast<size_t>(rank)];
    double value = 1;
    int left = kCalls;
    std::promise<void> finished;
    const Request request{Collective::all_reduce, DType::float64, ReduceOp::max, 0, {},
                          {{&value, 1}}};
    Completion next = [&](std::exception_ptr error) {
      EXPECT_FALSE(error);
      value += 1;
      if (--left == 0) return finished.set_value();
      mine.launch(request, next);
    };
    mine.launch(request, next);
    finished.get_future().get();
    EXPECT_EQ(value, 1 + kCalls);
  });
}

TEST(LocalCommunicatorCost, StartupsOverlapAndCallsCompleteInOrder) {
  constexpr double kAlpha = 0.1;
  constexpr int kCalls = 200;
  Communicators ranks = make_local_communicators(2, {kAlpha, 0});
  const double start = now_s();
  on_each_rank(2, [&](int rank) {
    std::vector<float> values(kCalls, 1.0F);
    std::vector<int> order;  // written by the hub's thread until the last future is ready
    std::vector<std::future<void>> pending;
    for (int i = 0; i < kCalls; ++i) {
      auto done = std::make_shared<std::promise<void>>();
      pending.push_back(done->get_future());
      ranks[static_cast<size_t>(rank)]->launch({Collective::all_reduce,
                                                DType::float32,
                                                ReduceOp::sum,
                                                0,
                                                {},
                                                {{&values[static_cast<size_t>(i)], 1}}},
                                               [&order, i, done](std::exception_ptr) {
                                                 order.push_back(i);
                                                 done->set_value();
                                               });
    }
    for (std::future<void>& p : pending) p.get();
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
    EXPECT_EQ(order.size(), static_cast<size_t>(kCalls));
  });
  const double elapsed = now_s() - start;
  EXPECT_GE(elapsed, kAlpha);
  EXPECT_LT(elapsed, kAlpha * (kCalls - 1));
}

TEST(LocalCommunicatorCost, TransfersTakeTurns) {
  constexpr double kBeta = 1e-6;  // 20 ms for each call
  constexpr int64_t kCount = 5000;
  constexpr int kCalls = 5;
  Communicators ranks = make_local_communicators(2, {0, kBeta});
  on_each_rank(2, [&](int rank) {
    std::vector<std::vector<float>> data(kCalls, std::vector<float>(kCount));
    const double start = now_s();
    std::vector<Pending> pending;
    for (auto& d : data) {
      const Request request{Collective::all_reduce, DType::float32, {}, 0, {},
                            {{d.data(), kCount}}};
      pending.emplace_back(*ranks[static_cast<size_t>(rank)], request);
    }
    for (int i = 0; i < kCalls; ++i) {
      pending[static_cast<size_t>(i)].get();
      // The hub's clock starts when the last rank has posted, which is not before `start`.
      EXPECT_GE(now_s() - start, (i + 1) * kBeta * 4 * kCount);
    }
  });
}

TEST(LocalCommunicatorEnd, AnAbsentRankFailsTheOthersCalls) {
  Communicators ranks = make_local_communicators(3);
  const Request barrier;
  Pending waiting(*ranks[0], barrier);
  ranks[2].reset();
  const std::string message = message_of<FaultError>([&] { waiting.get(); });
  EXPECT_NE(message.find("rank 2"), std::string::npos) << message;
  EXPECT_NE(message.find("call 0 (barrier)"), std::string::npos) << message;
  EXPECT_THROW(ranks[1]->run(barrier), FaultError);
  EXPECT_THROW(ranks[0]->run(barrier), FaultError);
}

TEST(LocalCommunicatorEnd, DestructionCompletesOnesOwnCallsFirst) {
  Communicators ranks = make_local_communicators(2);
  std::atomic<int> failed = 0;
  for (int i = 0; i < 20; ++i) {
    ranks[0]->launch({}, [&](std::exception_ptr error) { failed += error ? 1 : 0; });
  }
  ranks[0].reset();
  EXPECT_EQ(failed, 20);
}

TEST(LocalCommunicatorEnd, CutsAnEmulatedTransferShort) {
  Communicators ranks = make_local_communicators(2, {3600, 0});
  Pending a(*ranks[0], {}), b(*ranks[1], {});
  const double start = now_s();
  ranks[0].reset();
  EXPECT_THROW(a.get(), FaultError);
  EXPECT_THROW(b.get(), FaultError);
  EXPECT_LT(now_s() - start, 60);
}

TEST(LocalCommunicatorEnd, CompletionsMayDestroyTheCommunicators) {
  Communicators ranks = make_local_communicators(2);
  std::promise<void> gone;
  Pending other(*ranks[1], {});
  ranks[0]->launch({}, [&](std::exception_ptr error) {
    EXPECT_FALSE(error);
    ranks.clear();
    gone.set_value();
  });
  gone.get_future().get();
  EXPECT_NO_THROW(other.get());
}

TEST(LocalCommunicatorEnd, CompletionsMayOwnTheCommunicators) {
  Communicators ranks = make_local_communicators(2);
  std::promise<void> done;
  std::shared_ptr<Communicator> mine = std::move(ranks[0]);
  std::weak_ptr<Communicator> watch = mine;
  mine->launch({}, [mine, &done](std::exception_ptr) { done.set_value(); });
  mine.reset();
  EXPECT_FALSE(watch.expired());
  ranks[1]->run({});
  done.get_future().get();
  ranks.clear();
  EXPECT_TRUE(watch.expired());
}

TEST(LocalCommunicatorEnd, WhoeverLeavesWhenEveryCallCompletesOnce) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Random setup(seed);
    const int size = static_cast<int>(setup(2, 6));
    const AlphaBeta cost{setup.one_in(2) ? 1e-4 : 0, 0};
    Communicators ranks = make_local_communicators(size, cost);
    std::atomic<int> launched = 0, completed = 0;
    on_each_rank(size, [&](int rank) {
      Random random(seed * 100 + static_cast<uint64_t>(rank));
      std::unique_ptr<Communicator> mine = std::move(ranks[static_cast<size_t>(rank)]);
      // Freed right after the communicator: a late access is a use after free.
      auto memory = std::make_unique<std::vector<float>>(1000, 1.0F);
      for (int64_t i = random(0, 30); i > 0; --i) {
        ++launched;
        mine->launch({Collective::all_reduce,
                      DType::float32,
                      ReduceOp::max,
                      0,
                      {},
                      {{memory->data(), 1000}}},
                     [&completed](std::exception_ptr) { ++completed; });
        if (random.one_in(10)) std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      mine.reset();
      memory.reset();
    });
    EXPECT_EQ(completed, launched);
  }
}

}  // namespace
}  // namespace usbyte
