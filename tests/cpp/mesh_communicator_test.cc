#include "usbyte/mesh_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "communicators.h"
#include "usbyte/error.h"
#include "usbyte/local_communicator.h"
#include "usbyte/mesh_simulator.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Pending;
using test::Random;

Topology mesh(const std::vector<int>& sizes) {
  Topology out;
  for (int size : sizes) {
    const std::string name = "d" + std::to_string(out.ndim());
    out.dimensions.push_back({name, size, 1e9, 1e-6, DimensionKind::ring, false});
  }
  return out;
}

/// By rank; lines and the flat one are threads' communicators.
std::vector<std::unique_ptr<MeshCommunicator>> communicators(const Topology& topology) {
  const int ranks = topology.ranks();
  std::vector<std::vector<std::shared_ptr<Communicator>>> lines(static_cast<size_t>(ranks));
  for (auto& of_rank : lines) of_rank.resize(topology.dimensions.size());
  for (int d = 0; d < topology.ndim(); ++d) {
    const auto at = static_cast<size_t>(d);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<int> line = topology.line(rank, d);
      if (line.size() == 1 || line[0] != rank) continue;
      auto made = make_local_communicators(topology.dimensions[at].size);
      for (size_t i = 0; i < line.size(); ++i) {
        lines[static_cast<size_t>(line[i])][at] = std::move(made[i]);
      }
    }
  }
  std::vector<std::unique_ptr<MeshCommunicator>> out;
  auto flat = make_local_communicators(ranks);
  for (size_t r = 0; r < lines.size(); ++r) {
    out.push_back(std::make_unique<MeshCommunicator>(topology, std::move(flat[r]), lines[r]));
  }
  return out;
}

std::shared_ptr<const MeshSchedule> schedule(const Topology& topology, std::vector<Route> routes,
                                             MeshQueue queue = MeshQueue::fifo) {
  const MeshCollective collective{Collective::all_reduce, 1e6, std::move(routes), {}, 0, {}};
  const MeshRun run = simulate_mesh(topology, {collective}, {queue});
  return std::make_shared<MeshSchedule>(run.schedule(collective));
}

/// Every order of the dimensions of more than one rank.
std::vector<Route> orders(const Topology& topology) {
  Route all;
  for (int d = 0; d < topology.ndim(); ++d) {
    if (topology.dimensions[static_cast<size_t>(d)].size > 1) all.push_back(d);
  }
  std::vector<Route> out;
  do out.push_back(all);
  while (std::ranges::next_permutation(all).found);
  return out;
}

/// Small integers, whose sums are exact; another for each rank and element.
float value(int rank, int64_t i) { return static_cast<float>((rank + 1) * (i % 7 - 3)); }

float sum(int ranks, int64_t i) {
  return static_cast<float>(ranks * (ranks + 1) / 2 * (i % 7 - 3));
}

/// Sums vectors of so many elements in as many spans, and checks them, on all ranks, for each
/// schedule; all at once.
void expect_sums(const Topology& topology, const std::vector<std::vector<int64_t>>& counts,
                 const std::vector<std::shared_ptr<const MeshSchedule>>& schedules) {
  const auto all = communicators(topology);
  const int ranks = topology.ranks();
  on_each_rank(ranks, [&](int rank) {
    std::vector<std::vector<std::vector<float>>> data;
    std::vector<Pending> pending;
    for (size_t s = 0; s < schedules.size(); ++s) {
      Request request{Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {}};
      request.schedule = schedules[s];
      for (int64_t count : counts[s % counts.size()]) {
        std::vector<float>& span =
            (request.recv.empty() ? data.emplace_back() : data.back()).emplace_back();
        for (int64_t i = 0; i < count; ++i) span.push_back(value(rank, i));
        request.recv.push_back({nullptr, count});
      }
      for (size_t i = 0; i < request.recv.size(); ++i) request.recv[i].data = data[s][i].data();
      pending.emplace_back(*all[static_cast<size_t>(rank)], request);
    }
    for (Pending& p : pending) p.get();
    for (const auto& spans : data) {
      for (const auto& span : spans) {
        for (int64_t i = 0; i < std::ssize(span); ++i) {
          ASSERT_EQ(span[static_cast<size_t>(i)], sum(ranks, i)) << i;
        }
      }
    }
  });
}

TEST(MeshCommunicator, EveryOrderOfEveryChunkIsTheSum) {
  const std::vector<std::vector<int>> meshes = {{2, 2}, {3, 2}, {1, 3}, {2, 1, 3}, {2, 2, 2}, {1}};
  for (const std::vector<int>& sizes : meshes) {
    const Topology topology = mesh(sizes);
    const std::vector<Route> each = orders(topology);
    std::vector<std::shared_ptr<const MeshSchedule>> schedules;
    for (const Route& first : each) {
      for (const Route& second : each) schedules.push_back(schedule(topology, {first, second}));
    }
    expect_sums(topology, {{1000}, {7, 0, 1, 64}, {3}}, schedules);
  }
}

TEST(MeshCommunicator, ThirtyTwoRanksInThreeDimensions) {
  const Topology topology = mesh({4, 4, 2});
  std::vector<std::shared_ptr<const MeshSchedule>> schedules;
  for (MeshQueue queue : {MeshQueue::fifo, MeshQueue::smallest_chunk_first}) {
    schedules.push_back(schedule(topology, orders(topology), queue));
  }
  expect_sums(topology, {{10'000}, {1}, {100, 31}}, schedules);
}

TEST(MeshCommunicator, RandomMeshesRoutesAndSizes) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    std::vector<int> sizes(static_cast<size_t>(random(1, 3)));
    for (int& size : sizes) size = static_cast<int>(random(1, 4));
    const Topology topology = mesh(sizes);
    const std::vector<Route> each = orders(topology);
    std::vector<std::shared_ptr<const MeshSchedule>> schedules;
    for (int64_t s = random(1, 3); s > 0; --s) {
      std::vector<Route> routes;
      for (int64_t chunk = random(1, 9); chunk > 0; --chunk) {
        routes.push_back(each[static_cast<size_t>(random(0, std::ssize(each) - 1))]);
      }
      schedules.push_back(schedule(topology, routes, MeshQueue(random(0, 1))));
    }
    std::vector<std::vector<int64_t>> counts(3);
    for (auto& of_request : counts) {
      for (int64_t span = random(1, 4); span > 0; --span) of_request.push_back(random(0, 300));
    }
    expect_sums(topology, counts, schedules);
  }
}

TEST(MeshCommunicator, WhatHasNoScheduleIsFlat) {
  const auto all = communicators(mesh({2, 2}));
  on_each_rank(4, [&](int rank) {
    float one = 1;
    all[static_cast<size_t>(rank)]->run(
        {Collective::all_reduce, DType::float32, ReduceOp::max, 0, {}, {{&one, 1}}});
    EXPECT_EQ(one, 1.0F);
  });
}

// Rank 3 goes at once; rank 0, on none of its lines, learns of it as ranks 1 and 2 go.
TEST(MeshCommunicator, ALostRankIsAFaultThatNamesTheDimension) {
  const Topology topology = mesh({2, 2});
  auto all = communicators(topology);
  const auto both = schedule(topology, {{0, 1}, {1, 0}});
  std::vector<std::string> errors(4);
  on_each_rank(4, [&](int rank) {
    auto& mine = all[static_cast<size_t>(rank)];
    if (rank == 3) return mine.reset();
    std::vector<float> data(100);
    Request request{Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {}};
    request.recv = {{data.data(), 100}};
    request.schedule = both;
    Pending first(*mine, request), second(*mine, request);
    const std::string what = message_of<FaultError>([&] { first.get(); });
    EXPECT_NE(what.find("over dimension 'd"), std::string::npos) << what;
    EXPECT_EQ(message_of<FaultError>([&] { second.get(); }), what);
    EXPECT_EQ(message_of<FaultError>([&] { mine->run(request); }), what);
    mine.reset();
  });
}

TEST(MeshCommunicator, RequestsThatCannotBeAreRefused) {
  const Topology topology = mesh({2, 2});
  const auto all = communicators(topology);
  float one = 1;
  Request request{Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {{&one, 1}}};
  request.schedule = schedule(topology, {{0, 1}});
  const auto refused = [&](Request r) { return message_of<UsageError>([&] { all[0]->run(r); }); };
  Request other = request;
  other.kind = Collective::reduce_scatter;
  EXPECT_NE(refused(other).find("only all_reduces"), std::string::npos);
  other = request;
  other.reduce = ReduceOp::max;
  EXPECT_NE(refused(other).find("are sums"), std::string::npos);
  other = request;
  other.schedule = schedule(mesh({2, 2, 2}), {{0, 1, 2}});
  EXPECT_NE(refused(other), "");
  MeshSchedule circle = *request.schedule;
  std::ranges::reverse(circle.order[0]);
  other.schedule = std::make_shared<MeshSchedule>(circle);
  EXPECT_NE(refused(other), "");
}

TEST(MeshCommunicator, LinesThatDoNotFitAreRefused) {
  std::vector<std::shared_ptr<Communicator>> flat, line;
  for (auto& c : make_local_communicators(4)) flat.push_back(std::move(c));
  for (auto& c : make_local_communicators(2)) line.push_back(std::move(c));
  const auto made = [&](std::vector<std::shared_ptr<Communicator>> lines) {
    return message_of<UsageError>([&] { MeshCommunicator(mesh({2, 2}), flat[1], lines); });
  };
  EXPECT_NE(made({line[1]}).find("1 lines"), std::string::npos);
  EXPECT_NE(made({line[1], line[1]}).find("'d1' has rank 1 of 2, not 0 of 2"), std::string::npos);
  EXPECT_NE(made({line[1], nullptr}).find("'d1' has rank 0 of 1"), std::string::npos);
}

}  // namespace
}  // namespace usbyte
