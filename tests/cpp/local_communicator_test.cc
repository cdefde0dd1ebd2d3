#include "usbyte/local_communicator.h"

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

template <typename T>
T fold(T a, T b, ReduceOp op) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    if (op == ReduceOp::sum) return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    if (op == ReduceOp::product) return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
  switch (op) {
    case ReduceOp::sum:
      return a + b;
    case ReduceOp::product:
      return a * b;
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      break;
  }
  return std::max(a, b);
}

// One random collective: what every rank passes and what it must find afterwards.
struct Case {
  Collective kind;
  DType dtype;
  ReduceOp reduce;
  int root;
  std::vector<int64_t> counts;
  std::vector<std::vector<Bytes>> in;  // by rank, by span
};

void fill(Random& random, DType dtype, Bytes& bytes) {
  const auto width = static_cast<size_t>(itemsize(dtype));
  for (size_t i = 0; i < bytes.size(); i += width) {
    const double real = static_cast<double>(random(-1'000'000, 1'000'000)) / 997;
    const float single = static_cast<float>(real);
    const auto integer = static_cast<uint64_t>(
        random(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
    const void* source = dtype == DType::float64   ? static_cast<const void*>(&real)
                         : dtype == DType::float32 ? static_cast<const void*>(&single)
                                                   : static_cast<const void*>(&integer);
    std::memcpy(&bytes[i], source, width);
  }
}

Case random_case(Random& random, int size) {
  constexpr DType kReducible[] = {DType::float32, DType::float64, DType::int32, DType::int64};
  Case c{};
  c.kind = static_cast<Collective>(random(0, 5));
  c.reduce = static_cast<ReduceOp>(random(0, 3));
  c.root = static_cast<int>(random(0, size - 1));
  c.dtype = c.kind <= Collective::reduce_scatter ? kReducible[random(0, 3)]
                                                 : static_cast<DType>(random(0, 7));
  if (c.kind == Collective::all_to_all) {
    c.counts = {random(0, 40) * size};
  } else if (c.kind != Collective::barrier) {
    for (int64_t s = random(1, 4); s > 0; --s) {
      c.counts.push_back(random.one_in(8) ? random(5000, 20'000) : random(0, 3 * size));
    }
  }
  for (int r = 0; r < size; ++r) {
    std::vector<Bytes> spans;
    for (int64_t n : c.counts) {
      spans.emplace_back(static_cast<size_t>(n * itemsize(c.dtype)));
      fill(random, c.dtype, spans.back());
    }
    c.in.push_back(std::move(spans));
  }
  return c;
}

template <typename T>
Bytes fold_ranks(const Case& c, size_t span) {
  Bytes out = c.in[0][span];
  for (size_t r = 1; r < c.in.size(); ++r) {
    for (size_t i = 0; i < out.size(); i += sizeof(T)) {
      T a, b;
      std::memcpy(&a, &out[i], sizeof(T));
      std::memcpy(&b, &c.in[r][span][i], sizeof(T));
      a = fold(a, b, c.reduce);
      std::memcpy(&out[i], &a, sizeof(T));
    }
  }
  return out;
}

Bytes fold_ranks(const Case& c, size_t span) {
  switch (c.dtype) {
    case DType::float32:
      return fold_ranks<float>(c, span);
    case DType::float64:
      return fold_ranks<double>(c, span);
    case DType::int32:
      return fold_ranks<int32_t>(c, span);
    default:
      return fold_ranks<int64_t>(c, span);
  }
}

// The serial reference. Checks only the part of `got` that is defined.
void expect_result(const Case& c, int rank, size_t span, const Bytes& got) {
  const int size = static_cast<int>(c.in.size());
  const int64_t width = itemsize(c.dtype), count = c.counts[span];
  const auto expect = [&](const Bytes& want, Block range) {
    EXPECT_TRUE(std::equal(got.begin() + range.begin * width, got.begin() + range.end * width,
                           want.begin() + range.begin * width))
        << name(c.kind) << " " << name(c.dtype) << " rank " << rank << " of " << size << " span "
        << span << " of " << count;
  };
  const Block whole{0, count};
  if (c.kind == Collective::all_reduce) expect(fold_ranks(c, span), whole);
  if (c.kind == Collective::reduce_scatter) expect(fold_ranks(c, span), shard(whole, rank, size));
  if (c.kind == Collective::broadcast) expect(c.in[static_cast<size_t>(c.root)][span], whole);
  for (int r = 0; r < size && c.kind == Collective::all_gather; ++r) {
    expect(c.in[static_cast<size_t>(r)][span], shard(whole, r, size));
  }
  if (c.kind != Collective::all_to_all) return;
  const auto chunk = count / size * width;
  for (int r = 0; r < size; ++r) {
    const Bytes& sent = c.in[static_cast<size_t>(r)][0];
    EXPECT_TRUE(std::equal(got.begin() + r * chunk, got.begin() + (r + 1) * chunk,
                           sent.begin() + rank * chunk))
        << "all_to_all rank " << rank << " chunk " << r;
  }
}

class EveryRankCount : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(LocalCommunicator, EveryRankCount, testing::Range(1, 9));

TEST_P(EveryRankCount, RandomCollectivesEqualTheSerialReference) {
  const int size = GetParam();
  Random random(static_cast<uint64_t>(size));
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.push_back(random_case(random, size));
  Communicators ranks = make_local_communicators(size);
  on_each_rank(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    EXPECT_EQ(ranks[r]->rank(), rank);
    EXPECT_EQ(ranks[r]->size(), size);
    std::vector<std::vector<Bytes>> memory;
    std::vector<Bytes> sent;
    std::vector<Pending> pending;
    for (size_t i = 0; i < cases.size(); ++i) {
      memory.push_back(cases[i].in[r]);
      sent.push_back(memory.back().empty() ? Bytes() : memory.back()[0]);
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      Request request{c.kind, c.dtype, c.reduce, c.root, {}, {}};
      for (size_t s = 0; s < c.counts.size(); ++s) {
        request.recv.push_back({memory[i][s].data(), c.counts[s]});
      }
      // Half of the exchanges are in place; ranks need not do the same.
      if (c.kind == Collective::all_to_all) {
        request.send = {(i + r) % 2 ? request.recv[0] : Span{sent[i].data(), c.counts[0]}};
      }
      if (i % 3 == 0) {
        ranks[r]->run(request);
      } else {
        pending.emplace_back(*ranks[r], request);
      }
    }
    for (Pending& p : pending) p.get();
    for (size_t i = 0; i < cases.size(); ++i) {
      for (size_t s = 0; s < memory[i].size(); ++s) {
        expect_result(cases[i], rank, s, memory[i][s]);
      }
    }
  });
}

TEST_P(EveryRankCount, MinAndMaxPropagateNan) {
  const int size = GetParam();
  Communicators ranks = make_local_communicators(size);
  for (ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    on_each_rank(size, [&](int rank) {
      for (int bad = 0; bad < size; ++bad) {
        float value = rank == bad ? std::nanf("") : static_cast<float>(rank);
        ranks[static_cast<size_t>(rank)]->run(
            {Collective::all_reduce, DType::float32, op, 0, {}, {{&value, 1}}});
        EXPECT_TRUE(std::isnan(value)) << "rank " << rank << ", NaN from " << bad;
      }
    });
  }
}

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
  const Span span{data.data(), 8};
  const std::vector<std::pair<const char*, Request>> requests = {
      {"all_reduce of float16", {Collective::all_reduce, DType::float16, {}, 0, {}, {span}}},
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
  constexpr int kCalls = 10;
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
