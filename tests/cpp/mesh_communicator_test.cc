// SPDX-License-Identifier: Apache-2.0
#include "comm/mesh_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "mesh_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using namespace test;
template <typename T>
using Spans = std::vector<std::vector<T>>;

/// What a rank puts in: all ranks have other numbers.
template <typename T>
Spans<T> numbers(const std::vector<int64_t>& counts, int rank, uint64_t seed) {
  Random random(seed * 1000 + static_cast<uint64_t>(rank));
  Spans<T> out;
  for (int64_t count : counts) {
    auto& span = out.emplace_back();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t drawn = random(-1'000'000, 1'000'000);
      span.push_back(std::is_integral_v<T> ? static_cast<T>(drawn * 4000) : T(drawn) / T(977));
    }
  }
  return out;
}

/// Sums are those of a flat all_reduce: the same numbers where they are exact, else the same bits
/// on all ranks and near the sum in double precision.
template <typename T>
void expect_sums(const std::vector<Spans<T>>& in, const std::vector<Spans<T>>& out,
                 const std::vector<Spans<T>>& flat) {
  for (size_t r = 0; r < out.size(); ++r) {
    if (std::is_integral_v<T>) {
      ASSERT_EQ(out[r], flat[r]) << "rank " << r;
      continue;
    }
    ASSERT_EQ(out[r], out[0]) << "rank " << r;  // no NaN and no zero is among them
  }
  for (size_t s = 0; s < in[0].size(); ++s) {
    for (size_t i = 0; i < in[0][s].size(); ++i) {
      double sum = 0, most = 0;
      for (const auto& of_rank : in) {
        sum += static_cast<double>(of_rank[s][i]);
        most += std::abs(static_cast<double>(of_rank[s][i]));
      }
      if (std::is_integral_v<T>) continue;
      const double bound = most * std::numeric_limits<float>::epsilon();
      ASSERT_NEAR(static_cast<double>(out[0][s][i]), sum, bound) << "element " << i;
    }
  }
}

/// All at once, each with the counts that follow those of the one before, and flat ones between.
template <typename T>
void run_schedules(Meshes& ranks, const std::vector<Schedule>& schedules,
                   const std::vector<std::vector<int64_t>>& counts) {
  const size_t requests = schedules.size();
  std::vector<std::vector<Spans<T>>> in(requests, std::vector<Spans<T>>(ranks.size()));
  auto out = in, flat = in;
  on_each_rank(static_cast<int>(ranks.size()), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    std::vector<Pending> pending;
    for (size_t i = 0; i < requests; ++i) {
      in[i][r] = numbers<T>(counts[i % counts.size()], rank, i);
      out[i][r] = flat[i][r] = in[i][r];
      pending.emplace_back(*ranks[r], sum_of(out[i][r], schedules[i]));
      pending.emplace_back(*ranks[r], sum_of(flat[i][r], nullptr));
    }
    for (Pending& p : pending) p.get();
  });
  for (size_t i = 0; i < requests && !testing::Test::HasFatalFailure(); ++i) {
    SCOPED_TRACE("request " + std::to_string(i) + ", " + schedules[i]->to_json());
    expect_sums(in[i], out[i], flat[i]);
  }
}

std::vector<Schedule> pairs_of_orders(const Topology& topology) {
  std::vector<Schedule> out;
  for (const Route& first : orders(topology)) {
    for (const Route& second : orders(topology)) {
      out.push_back(schedule(topology, {first, second}));
    }
  }
  return out;
}

TEST(MeshCommunicator, EveryOrderOfEveryChunkIsTheSum) {
  const std::vector<std::vector<int>> meshes = {{1},       {5},       {2, 2},      {3, 2},
                                                {1, 3},    {4, 4},    {2, 1, 3},   {2, 2, 2},
                                                {3, 2, 4}, {4, 4, 2}, {2, 2, 2, 2}};
  for (const std::vector<int>& sizes : meshes) {
    const Topology topology = mesh(sizes);
    SCOPED_TRACE(topology.to_json());
    std::vector<Schedule> schedules = pairs_of_orders(topology);
    if (schedules.size() > 40) schedules.resize(40);
    for (MeshQueue queue : {MeshQueue::fifo, MeshQueue::smallest_chunk_first}) {
      schedules.push_back(schedule(topology, orders(topology), queue));
    }
    Meshes ranks = communicators(topology);
    run_schedules<float>(ranks, schedules, {{1000}, {7, 0, 1, 64}, {3}});
    run_schedules<int64_t>(ranks, schedules, {{301}, {1}, {0}, {5, 90}});
  }
}

template <typename T>
void run_random(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  std::vector<int> sizes(static_cast<size_t>(random(1, 4)));
  for (int& size : sizes) size = static_cast<int>(random(1, sizes.size() > 2 ? 3 : 5));
  const Topology topology = mesh(sizes);
  std::vector<Schedule> schedules;
  for (int64_t s = random(1, 5); s > 0; --s) schedules.push_back(random_schedule(topology, random));
  std::vector<std::vector<int64_t>> counts(3);
  for (auto& of_request : counts) {
    for (int64_t span = random(0, 4); span > 0; --span) {
      of_request.push_back(random.one_in(2) ? random(0, 300) : random(0, topology.ranks()));
    }
  }
  std::atomic<uint64_t> late_seed = seed;
  Meshes ranks = communicators(topology, random.one_in(2) ? late(late_seed) : Wrap());
  run_schedules<T>(ranks, schedules, counts);
}

TEST(MeshCommunicator, RandomMeshesRoutesAndSizes) {
  for (uint64_t seed = 0; seed < 60 && !HasFatalFailure(); seed += 4) {
    run_random<float>(seed);
    run_random<int32_t>(seed + 1);
    run_random<double>(seed + 2);
    run_random<int64_t>(seed + 3);
  }
}

TEST(MeshCommunicator, ThreadsOfOneRankMayLaunchTogether) {
  const Topology topology = mesh({2, 3});
  Meshes ranks = communicators(topology);
  const Schedule both = schedule(topology, {{0, 1}, {1, 0}});
  on_each_rank(6 * 3, [&](int thread) {
    for (int i = 0; i < 20; ++i) {
      // Which threads meet is open; whoever it is, the ranks' values are these.
      const auto rank = static_cast<size_t>(thread % 6);
      Spans<int64_t> data(1, std::vector<int64_t>(10, 1 + thread % 6));
      ranks[rank]->run(sum_of(data, both));
      EXPECT_EQ(data[0], std::vector<int64_t>(10, 21));
    }
  });
}

TEST(MeshCommunicator, OtherCollectivesAreFlat) {
  Meshes ranks = communicators(mesh({2, 2}));
  on_each_rank(4, [&](int rank) {
    auto one = static_cast<float>(rank);
    const BufferView span{&one, 1};
    MeshCommunicator& mine = *ranks[static_cast<size_t>(rank)];
    mine.run({Collective::all_reduce, DType::float32, ReduceOp::max, 0, {}, {span}});
    EXPECT_EQ(one, 3.0F);
    one = static_cast<float>(rank);
    mine.run({Collective::broadcast, DType::float32, ReduceOp::sum, 2, {}, {span}});
    EXPECT_EQ(one, 2.0F);
    mine.run({});
    EXPECT_EQ(mine.rank(), rank);
    EXPECT_EQ(mine.size(), 4);
    EXPECT_EQ(mine.failure(), "");
    EXPECT_FALSE(mine.stream_ordered());
  });
}

TEST(MeshCommunicator, RequestsThatCannotBeAreRefused) {
  const Topology topology = mesh({2, 2});
  Meshes ranks = communicators(topology);
  Spans<float> data(1, {1});
  const Request good = sum_of(data, schedule(topology, {{0, 1}}));
  const auto expect_refused = [&](const std::string& why, auto change) {
    Request request = good;
    change(request);
    const std::string message = message_of<UsageError>([&] { ranks[0]->run(request); });
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  expect_refused("broadcast with a schedule: only all_reduces have one",
                 [](Request& r) { r.kind = Collective::broadcast; });
  expect_refused("sums only", [](Request& r) { r.reduce = ReduceOp::max; });
  expect_refused("do not scale", [](Request& r) { r.scale = 0.25; });
  expect_refused("order on a device", [](Request& r) { r.order.emplace(); });
  expect_refused("count -3 is negative", [](Request& r) { r.recv[0].count = -3; });
  expect_refused("a span of 1 elements has no memory",
                 [](Request& r) { r.recv[0].data = nullptr; });
  const auto with_schedule = [&](const std::string& why, const MeshSchedule& schedule) {
    expect_refused(why, [&](Request& r) { r.schedule = std::make_shared<MeshSchedule>(schedule); });
  };
  MeshSchedule changed = *good.schedule;
  changed.kind = Collective::reduce_scatter;
  with_schedule("it is one of reduce_scatter", changed);
  changed = *good.schedule;
  std::ranges::reverse(changed.order[0]);
  with_schedule("waits for ever", changed);
  with_schedule("3 dimensions for 2", *schedule(mesh({2, 2, 2}), {{0, 1, 2}}));
  changed = {Collective::all_reduce, {}, {{}, {}}};
  with_schedule("no routes", changed);
  // Nothing of these is left behind.
  on_each_rank(4, [&](int rank) {
    Spans<float> mine(1, {1});
    ranks[static_cast<size_t>(rank)]->run(sum_of(mine, good.schedule));
    EXPECT_EQ(mine[0][0], 4.0F);
  });
}

TEST(MeshCommunicator, RequestsAlongALineAreAmongItsRanks) {
  const Topology topology = mesh({2, 3});
  Meshes ranks = communicators(topology);
  EXPECT_EQ(*ranks[0]->topology(), topology);
  on_each_rank(6, [&](int rank) {
    const std::vector<int> place = topology.coordinates(rank);
    for (int dimension : {0, 1, 0}) {
      const auto at = static_cast<size_t>(dimension);
      const int size = topology.dimensions[at].size;
      std::vector<int32_t> data(5, rank);
      Request request;
      request.dtype = DType::int32;
      request.dimension = dimension;
      request.recv = {{data.data(), 5}, {nullptr, 0}};
      int32_t sum = 0;
      for (int other : topology.axis_group(rank, dimension)) sum += other;
      for (auto kind : {Collective::reduce_scatter, Collective::all_gather}) {
        request.kind = kind;
        ranks[static_cast<size_t>(rank)]->run(request);
        const Block own = shard({0, 5}, place[at], size);
        for (int64_t i = 0; i < 5; ++i) {
          const bool there = kind == Collective::all_gather || (own.begin <= i && i < own.end);
          EXPECT_TRUE(!there || data[static_cast<size_t>(i)] == sum);
        }
      }
      request.kind = Collective::all_reduce;
      ranks[static_cast<size_t>(rank)]->run(request);
      EXPECT_EQ(data, std::vector<int32_t>(5, sum * size));
      // To the n-th rank of the axis group 10 times this rank, and n.
      std::vector<int32_t> parts(static_cast<size_t>(size));
      for (size_t n = 0; n < parts.size(); ++n) parts[n] = 10 * rank + static_cast<int32_t>(n);
      request.kind = Collective::all_to_all;
      request.recv = request.send = {{parts.data(), size}};
      ranks[static_cast<size_t>(rank)]->run(request);
      const std::vector<int> others = topology.axis_group(rank, dimension);
      for (size_t n = 0; n < parts.size(); ++n) EXPECT_EQ(parts[n], 10 * others[n] + place[at]);
    }
  });
}

TEST(MeshCommunicator, RequestsThatCannotGoAlongALineAreRefused) {
  const Topology topology = mesh({2, 2});
  Meshes ranks = communicators(topology);
  float one = 1;
  const auto expect_refused = [&](const std::string& why, auto change) {
    Request request;
    request.kind = Collective::all_reduce;
    request.dimension = 1;
    request.recv = {{&one, 1}};
    change(request);
    const std::string message = message_of<UsageError>([&] { ranks[0]->run(request); });
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  expect_refused("no dimension 2", [](Request& r) { r.dimension = 2; });
  expect_refused("cannot have a dimension",
                 [&](Request& r) { r.schedule = schedule(topology, {{0, 1}}); });
  expect_refused("only all_reduces, reduce_scatters, all_gathers and all_to_alls",
                 [](Request& r) { r.kind = Collective::broadcast; });
  expect_refused("in place", [](Request& r) { r.send = r.recv; });
  expect_refused("in place", [](Request& r) { r.kind = Collective::all_to_all; });
  expect_refused("each of 2 ranks", [](Request& r) {
    r.kind = Collective::all_to_all;
    r.send = r.recv;
  });
  expect_refused("sums only", [](Request& r) { r.reduce = ReduceOp::max; });
}

// Schedules are validated once, but not what is another one at the same place or of one owner.
TEST(MeshCommunicator, WhatIsKnownOfAScheduleIsNotSaidOfOthers) {
  const Topology topology = mesh({1});
  Meshes ranks = communicators(topology);
  Spans<float> data(1, {1});
  MeshSchedule good = *schedule(topology, {Route()}), bad = good;
  bad.order[0] = {{0, 0, 0}};
  MeshSchedule place = good;
  const auto shared = [&] { return Schedule(&place, [](const MeshSchedule*) {}); };
  const auto run = [&](const Schedule& schedule) { ranks[0]->run(sum_of(data, schedule)); };
  run(shared());
  place = bad;
  EXPECT_THROW(run(shared()), UsageError);
  const auto two = std::make_shared<std::pair<MeshSchedule, MeshSchedule>>(good, bad);
  run(Schedule(two, &two->first));
  EXPECT_THROW(run(Schedule(two, &two->second)), UsageError);
  run(Schedule(two, &two->first));
}

class Unusable final : public Communicator {
 public:
  int rank() const override { return 1; }
  int size() const override { return size_; }
  void launch(const Request&, Completion) override {}
  bool stream_ordered() const override { return true; }
  explicit Unusable(int size) : size_(size) {}

 private:
  const int size_;
};

TEST(MeshCommunicator, CommunicatorsThatDoNotFitAreRefused) {
  using Groups = std::vector<std::shared_ptr<Communicator>>;
  Groups flat, group;
  for (auto& c : make_local_communicators(4)) flat.push_back(std::move(c));
  for (auto& c : make_local_communicators(2)) group.push_back(std::move(c));
  const auto expect_refused = [&](const std::string& why, const Groups& axis_groups,
                                  std::shared_ptr<Communicator> over) {
    const std::string message = message_of<UsageError>(
        [&] { MeshCommunicator(mesh({2, 2}), std::move(over), axis_groups); });
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  expect_refused("and 1 axis groups", {group[1]}, flat[1]);
  expect_refused("'d1' has rank 1 of 2, not 0 of 2", {group[1], group[1]}, flat[1]);
  expect_refused("'d0' has rank 0 of 2, not 1 of 2", {group[0], group[0]}, flat[1]);
  expect_refused("'d1' has rank 0 of 1", {group[1], nullptr}, flat[1]);
  expect_refused("no flat communicator", {group[1], group[0]}, nullptr);
  expect_refused("of 2 ranks and 2 axis groups", {group[1], group[0]}, group[1]);
  expect_refused("what the flat communicator does is complete when it is on a stream",
                 {group[1], group[0]}, std::make_shared<Unusable>(4));
  expect_refused("what the axis group of dimension 'd0' does is complete when it is on a stream",
                 {std::make_shared<Unusable>(2), group[0]}, flat[1]);
  MeshCommunicator(mesh({2, 2}), flat[1], {group[1], group[0]});
}

}  // namespace
}  // namespace usbyte
