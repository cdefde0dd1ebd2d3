// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "cuda/emulation/emulated_cuda.h"
#include "cuda/emulation/host_kernels.h"
#include "kernel_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::message_of;
using test::Random;
using test::RunInShape;

// Memory whose neighbours on either side must keep what they have.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t size) : memory_(static_cast<size_t>(size + 2 * kGuard), kUntouched) {}

  T* data() { return memory_.data() + kGuard; }
  std::span<const T> get() const {
    return std::span<const T>(memory_).subspan(kGuard, memory_.size() - 2 * kGuard);
  }
  bool intact() const { return untouched(0, kGuard) && untouched(memory_.size() - kGuard, kGuard); }
  /// From this element of `get` on.
  bool untouched_from(int64_t begin) const {
    const size_t at = kGuard + static_cast<size_t>(begin);
    return untouched(at, memory_.size() - at);
  }

 private:
  static constexpr T kUntouched = -77;
  static constexpr size_t kGuard = 64;

  bool untouched(size_t begin, size_t size) const {
    const auto part = std::span<const T>(memory_).subspan(begin, size);
    return std::ranges::all_of(part, [](T v) { return v == kUntouched; });
  }

  std::vector<T> memory_;
};

// A batch that is partitioned, and what must hold of every one.
class Partition {
 public:
  Partition(const RowPartition& shape, std::vector<int64_t> ids)
      : shape_(shape),
        given_(std::move(ids)),
        table_(shape.table_size()),
        ids_(std::ssize(given_)),
        positions_(std::ssize(given_)),
        tallies_(shape.tallies_size()) {}

  template <typename Run>
  Partition& operator()(Run&& run) {
    kernels::partition_rows(shape_, given_.data(), nullptr, std::ssize(given_), table_.data(),
                            {ids_.data(), positions_.data(), tallies_.data()}, run);
    return *this;
  }

  int64_t unplaced() const { return tallies_.get()[0]; }
  int64_t count(int server) const { return tallies_.get()[1 + static_cast<size_t>(server)]; }
  int64_t missed(int server) const { return count(shape_.servers + server); }
  int64_t missed() const {
    int64_t out = 0;
    for (int s = 0; s < shape_.servers; ++s) out += missed(s);
    return out;
  }

  // What is listed is right, what is not is counted, and nothing else is written.
  void expect_accounted() const {
    ASSERT_TRUE(table_.intact() && ids_.intact() && positions_.intact() && tallies_.intact());
    const sparse::HashPartitioner servers(shape_.rows, shape_.servers, shape_.seed);
    std::vector<bool> listed(given_.size());
    int64_t at = 0, overflowed = 0;
    for (int s = 0; s < shape_.servers; ++s) {
      overflowed += std::max<int64_t>(0, missed(s) - shape_.serial);
      for (const int64_t end = at + count(s); at < end; ++at) {
        const auto i = static_cast<size_t>(at);
        const auto position = static_cast<size_t>(positions_.get()[i]);
        ASSERT_LT(position, given_.size());
        ASSERT_FALSE(listed[position]) << position;
        listed[position] = true;
        ASSERT_EQ(ids_.get()[i], given_[position]);
        ASSERT_EQ(servers.place(given_[position]).server, s);
      }
    }
    ASSERT_TRUE(ids_.untouched_from(at) && positions_.untouched_from(at));
    const auto nowhere =
        std::ranges::count_if(given_, [&](int64_t id) { return id < 0 || id >= shape_.rows; });
    ASSERT_EQ(unplaced(), overflowed + nowhere);
    ASSERT_EQ(at + unplaced(), std::ssize(given_));
  }

  // As the host's partition.
  void expect_whole() const {
    ASSERT_EQ(unplaced(), 0);
    expect_accounted();  // all, each once, with its server
  }

 private:
  RowPartition shape_;
  std::vector<int64_t> given_;
  Guarded<int32_t> table_;
  Guarded<int64_t> ids_;
  Guarded<int32_t> positions_, tallies_;
};

std::vector<int64_t> run_of(int64_t begin, int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), begin);
  return out;
}

std::vector<int64_t> drawn(Random& random, int64_t rows, int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  for (int64_t& id : out) id = random(0, rows - 1);
  return out;
}

std::vector<int64_t> of_server(const RowPartition& shape, int server, int64_t count) {
  const sparse::HashPartitioner servers(shape.rows, shape.servers, shape.seed);
  std::vector<int64_t> out;
  for (int64_t key = 0; key < count; ++key) out.push_back(servers.id(server, key));
  return out;
}

TEST(KernelsPartition, GroupsAsTheHostDoesInEveryShapeOfTheGrid) {
  Random random(1);
  for (int servers : {1, 2, 3, 4, 7, 16, 64}) {
    for (int64_t rows : {int64_t{5000}, int64_t{1} << 31, int64_t{1} << 40}) {
      for (int64_t count : {0, 1, 2, 33, 1000}) {
        const auto shape = RowPartition::of(rows, servers, static_cast<uint64_t>(count), count);
        for (RunInShape& run : test::shapes()) {
          Partition(shape, run_of(random(0, rows - count), count))(run).expect_whole();
          Partition(shape, drawn(random, rows, count))(run).expect_whole();
          Partition(shape, run_of(rows - count, count))(run).expect_whole();
        }
      }
    }
  }
}

TEST(KernelsPartition, EqualIdsHaveAPlaceEach) {
  RunInShape run{3, 32};
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 1200; ++i) ids.push_back(100 + i % 300);
  auto shape = RowPartition::of(1000, 4, 5, 1200);
  shape.serial = 1200;
  Partition fours(shape, ids);
  fours(run).expect_whole();
  EXPECT_GE(fours.missed(), 300);  // of four equal ones at least one

  Partition one(RowPartition{10, 2, 0, 50, 97, 3}, std::vector<int64_t>(100, 7));
  one(run).expect_whole();
  EXPECT_EQ(one.missed(), 97);
  Partition more(RowPartition{10, 2, 0, 50, 96, 3}, std::vector<int64_t>(100, 7));
  more(run).expect_accounted();
  EXPECT_EQ(more.unplaced(), 1);
}

TEST(KernelsPartition, RowsOfOneServerHaveItsPlacesAndNoOther) {
  RunInShape run{7, 33};
  for (int servers : {2, 8, 64}) {
    auto shape = RowPartition::of(int64_t{1} << 40, servers, 3, 4000);
    for (int server : {0, servers - 1}) {
      Partition crowded(shape, of_server(shape, server, 4000));
      crowded(run).expect_accounted();
      EXPECT_GT(crowded.unplaced(), 0);
      EXPECT_EQ(crowded.count(server) + crowded.unplaced(), 4000);
    }
    shape.serial = 4000;
    Partition roomy(shape, of_server(shape, 1, 4000));
    roomy(run).expect_whole();
    EXPECT_EQ(roomy.count(1), 4000);
  }
}

TEST(KernelsPartition, WhatHasNoPlaceIsCountedAndWritesNothing) {
  Random random(2);
  for (int64_t slots : {1, 10, 500}) {
    for (int64_t serial : {0, 1, 50}) {
      for (int32_t hashes = 1; hashes <= kMostPartitionHashes; ++hashes) {
        const RowPartition shape{int64_t{1} << 40, 5, 9, slots, serial, hashes};
        for (RunInShape& run : test::shapes()) {
          Partition full(shape, drawn(random, shape.rows, 2700));
          full(run).expect_accounted();
          EXPECT_GE(full.unplaced(), 2700 - 5 * (slots + serial));
        }
      }
    }
  }
}

TEST(KernelsPartition, IdsThatAreNoRowsAreCounted) {
  constexpr int64_t kLow = std::numeric_limits<int64_t>::min();
  constexpr int64_t kHigh = std::numeric_limits<int64_t>::max();
  RunInShape run{3, 32};
  Partition odd(RowPartition::of(10, 3, 0, 8), {-1, 0, kLow, 9, 10, kHigh, 4, -2});
  odd(run).expect_accounted();
  EXPECT_EQ(odd.unplaced(), 5);
}

TEST(KernelsPartition, MissesAreThoseThatArePublished) {
  constexpr double kPublished[] = {0.213, 0.075, 0.030, 0.012};  // load 0.5, k = 1, 2, 3, 4
  Random random(3);
  RunInShape run{64, 256};
  constexpr int64_t kCount = 100000;
  for (int32_t hashes = 1; hashes <= kMostPartitionHashes; ++hashes) {
    for (const auto& ids : {drawn(random, int64_t{1} << 40, kCount), run_of(12345, kCount)}) {
      auto shape = RowPartition::of(int64_t{1} << 40, 4, 7, kCount);
      shape.hashes = hashes;
      shape.serial = shape.slots;
      Partition half(shape, ids);
      half(run).expect_whole();
      const double share = static_cast<double>(half.missed()) / static_cast<double>(kCount);
      EXPECT_NEAR(share, kPublished[hashes - 1], 0.003) << hashes;
    }
  }
}

// Each kernel's threads are dealt out to threads of the host.
struct RunOnThreads {
  static constexpr uint32_t kThreads = 6, kBlocks = 40;

  template <typename Kernel>
  void operator()(const Kernel& kernel) const {
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&kernel, t] {
        for (uint32_t block = 0; block < kBlocks; ++block) {
          kernel(kernels::GridIndex{block, t, kBlocks, kThreads});
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST(KernelsPartition, ThreadsLoseNothing) {
  Random random(4);
  for (int round = 0; round < 20; ++round) {
    const int64_t count = 20000, rows = round % 2 ? int64_t{1} << 40 : 7000;
    const auto ids = drawn(random, rows, count);
    auto shape = RowPartition::of(rows, static_cast<int>(random(1, 8)), 1, count);
    shape.serial = count;
    Partition(shape, ids)(RunOnThreads{}).expect_whole();
    shape.slots = random(1, 100);
    Partition(shape, ids)(RunOnThreads{}).expect_whole();
    shape.serial = random(0, 500);
    Partition(shape, ids)(RunOnThreads{}).expect_accounted();
  }
}

// A model checker: runs threads step after step, an operation on shared memory being one, in every
// order there is. A step runs its thread anew, with what it has been told before.
class Interleaving {
 public:
  using Body = std::function<void(int thread)>;

  /// Calls `begin`, all threads' steps and `end`, for each order; returns how many there are.
  static int all(int threads, const Body& body, const std::function<void()>& begin,
                 const std::function<void()>& end) {
    Interleaving model{threads, body, begin, end};
    model.explore();
    return model.orders_;
  }

  /// One operation.
  template <typename Op>
  static int32_t step(Op op) {
    std::vector<int32_t>& told = *told_;
    if (next_ < told.size()) return told[next_++];
    if (next_ == limit_) throw Stop{};
    told.push_back(op());
    return told[next_++];
  }

 private:
  struct Stop {};

  Interleaving(int threads, Body body, std::function<void()> begin, std::function<void()> end)
      : threads_(threads), body_(std::move(body)), begin_(std::move(begin)), end_(std::move(end)) {}

  void explore() {
    begin_();
    std::vector<std::vector<int32_t>> told(static_cast<size_t>(threads_));
    std::vector<bool> over(told.size());
    for (int t : order_) over[static_cast<size_t>(t)] = advance(t, told[static_cast<size_t>(t)]);
    if (std::ranges::all_of(over, [](bool o) { return o; })) {
      ++orders_;
      return end_();
    }
    for (int t = 0; t < threads_; ++t) {
      if (over[static_cast<size_t>(t)]) continue;
      order_.push_back(t);
      explore();
      order_.pop_back();
    }
  }

  bool advance(int thread, std::vector<int32_t>& told) const {
    told_ = &told;
    next_ = 0;
    limit_ = told.size() + 1;
    try {
      body_(thread);
      return true;
    } catch (Stop) {
      return false;
    }
  }

  const int threads_;
  const Body body_;
  const std::function<void()> begin_, end_;
  std::vector<int> order_;
  int orders_ = 0;
  static inline std::vector<int32_t>* told_;
  static inline size_t next_, limit_;
};

struct SteppedAtomics {
  static int32_t compare_and_swap(int32_t* place, int32_t expected, int32_t desired) {
    return Interleaving::step(
        [&] { return kernels::Atomics::compare_and_swap(place, expected, desired); });
  }
  static int32_t add(int32_t* place, int32_t value) {
    return Interleaving::step([&] { return kernels::Atomics::add(place, value); });
  }
};

// `threads` threads claim places for `ids`, in every order of their steps. Returns how many.
int claim_in_all_orders(const RowPartition& shape, int threads, const std::vector<int64_t>& ids) {
  std::vector<int32_t> table, tallies;
  const auto begin = [&] {
    table.assign(static_cast<size_t>(shape.table_size() + 1), kernels::kEmpty);  // and a guard
    tallies.assign(static_cast<size_t>(shape.tallies_size()), 0);
  };
  const auto claim = [&](int thread) {
    kernels::ClaimKernel<SteppedAtomics>{
        {table.data(), tallies.data(), shape.servers, shape.slots, shape.serial},
        sparse::HashPartitioner(shape.rows, shape.servers, shape.seed),
        shape.rows,
        {1, 2, 3, 4},
        shape.hashes,
        ids.data(),
        nullptr,
        std::ssize(ids)}({0, static_cast<uint32_t>(thread), 1, static_cast<uint32_t>(threads)});
  };
  return Interleaving::all(threads, claim, begin, [&] {
    ASSERT_EQ(table.back(), kernels::kEmpty);
    int32_t placed = 0;
    for (int32_t i = 0; i < std::ssize(ids); ++i) {
      const auto places = std::ranges::count(table, i);
      ASSERT_LE(places, 1);
      placed += static_cast<int32_t>(places);
    }
    const auto missed = tallies[2];  // of the only server
    ASSERT_EQ(tallies[0], std::max<int64_t>(0, missed - shape.serial));
    ASSERT_EQ(placed + tallies[0], std::ssize(ids));
  });
}

TEST(KernelsPartition, NoOrderOfStepsLosesARow) {
  int orders = 0;
  for (int64_t slots = 1; slots <= 3; ++slots) {
    for (int64_t serial = 0; serial <= 2; ++serial) {
      for (int32_t hashes = 1; hashes <= 4; ++hashes) {
        const RowPartition shape{9, 1, 0, slots, serial, hashes};
        for (int64_t other = 0; other < 6; ++other) {
          orders += claim_in_all_orders(shape, 2, {0, other});
          if (hashes <= 2) orders += claim_in_all_orders(shape, 2, {0, other, other, 5});
          if (hashes <= 2) orders += claim_in_all_orders(shape, 3, {0, other, 5});
        }
      }
    }
  }
  EXPECT_GT(orders, 10000);
}

TEST(KernelsPartition, WriteThenReadBackLosesARowInFourOfTwentyOrders) {
  int32_t slot = 0;
  std::array<bool, 2> missed{};
  int lost = 0;
  // As published; the steps that a thread leaves out are taken for empty.
  const auto claim = [&](int32_t me) {
    const bool empty = Interleaving::step([&] { return slot; }) == kernels::kEmpty;
    Interleaving::step([&] { return empty ? slot = me : 0; });
    missed[static_cast<size_t>(me)] = Interleaving::step([&] { return slot; }) != me;
  };
  const int orders = Interleaving::all(
      2, claim, [&] { slot = kernels::kEmpty; },
      [&] {
        for (int32_t me : {0, 1}) lost += !missed[static_cast<size_t>(me)] && slot != me;
      });
  EXPECT_EQ(orders, 20);
  EXPECT_EQ(lost, 4);
}

TEST(KernelsPartition, RunsOnAStreamWithItsCountOnTheDevice) {
  const auto cuda = make_emulated_cuda({.most_delay_s = 1e-4});
  const OwnedStream stream(cuda, false);
  const auto shape = RowPartition::of(1000, 4, 0, 300);
  const std::vector<int64_t> ids = run_of(50, 300);
  std::vector<int64_t> ids_out(300);
  std::vector<int32_t> positions(300), table(static_cast<size_t>(shape.table_size()));
  std::vector<int32_t> tallies(static_cast<size_t>(shape.tallies_size()));
  int64_t count = 0;
  const auto unplaced = [&](int64_t rows, int64_t most = 300) {
    count = rows;
    cuda->partition_rows(shape, ids.data(), &count, most, table.data(),
                         {ids_out.data(), positions.data(), tallies.data()}, stream.get());
    cuda->synchronize(stream.get());
    return tallies[0];
  };
  const auto placed = [&] { return std::accumulate(&tallies[1], &tallies[5], 0); };
  for (int rows : {0, 1, 299, 300}) {
    EXPECT_EQ(unplaced(rows), 0);
    EXPECT_EQ(placed(), rows);
  }
  EXPECT_GT(unplaced(301), 0);
  EXPECT_EQ(placed(), 300);
  EXPECT_GT(unplaced(-1), 0);
  EXPECT_EQ(placed(), 0);
  EXPECT_GT(unplaced(1, 0), 0);
  EXPECT_EQ(unplaced(0, 0), 0);
  EXPECT_EQ(placed(), 0);
}

TEST(KernelsPartition, RefusesWhatItCannotCount) {
  int64_t id = 0;
  int32_t number[200];
  const auto refused = [&](const RowPartition& shape, int64_t most, RowGroups groups) {
    return message_of<UsageError>(
        [&] { host::partition_rows(shape, &id, nullptr, most, number, groups); });
  };
  const RowGroups groups{&id, number, number};
  const auto good = RowPartition::of(10, 2, 0, 1);
  auto shape = good;
  shape.servers = 0;
  EXPECT_NE(refused(shape, 1, groups).find("0 servers"), std::string::npos);
  shape = good;
  shape.slots = 0;
  EXPECT_NE(refused(shape, 1, groups).find("0 slots"), std::string::npos);
  shape = good;
  shape.serial = -1;
  EXPECT_NE(refused(shape, 1, groups).find("-1 serial"), std::string::npos);
  shape = good;
  shape.hashes = 5;
  EXPECT_NE(refused(shape, 1, groups).find("5 hashes"), std::string::npos);
  EXPECT_NE(refused(good, -1, groups).find("of -1"), std::string::npos);
  EXPECT_NE(refused(good, int64_t{1} << 31, groups).find("2^31"), std::string::npos);
  EXPECT_NE(refused(good, 1, {nullptr, number, number}).find("ids"), std::string::npos);
  EXPECT_NE(refused(good, 1, {&id, number, nullptr}).find("tallies"), std::string::npos);
}

}  // namespace
}  // namespace usbyte
