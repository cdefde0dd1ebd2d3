// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/local_communicator.h"
#include "comm/mesh_communicator.h"
#include "communicators.h"
#include "ranks.h"
#include "simulator/mesh_simulator.h"

// Meshes whose ranks are threads, and schedules on them.
namespace usbyte::test {

using Schedule = std::shared_ptr<const MeshSchedule>;
using Meshes = std::vector<std::unique_ptr<MeshCommunicator>>;

inline Topology mesh(const std::vector<int>& sizes) {
  Topology out;
  for (int size : sizes) {
    const std::string name = "d" + std::to_string(out.ndim());
    out.dimensions.push_back({name, size, 1e9, 1e-6, DimensionKind::ring, false});
  }
  return out;
}

/// What becomes of the communicator of each axis group, and of the flat one.
using Wrap = std::function<std::shared_ptr<Communicator>(std::unique_ptr<Communicator>)>;

/// By rank; over communicators of threads, `wrapped`.
inline Meshes communicators(const Topology& topology, const Wrap& wrap = {}) {
  const auto wrapped = [&](std::unique_ptr<Communicator> made) {
    return wrap ? wrap(std::move(made)) : std::shared_ptr<Communicator>(std::move(made));
  };
  const int ranks = topology.ranks();
  std::vector<std::vector<std::shared_ptr<Communicator>>> axis_groups(static_cast<size_t>(ranks));
  for (auto& of_rank : axis_groups) of_rank.resize(topology.dimensions.size());
  for (int d = 0; d < topology.ndim(); ++d) {
    const auto at = static_cast<size_t>(d);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<int> group = topology.axis_group(rank, d);
      if (group.size() == 1 || group[0] != rank) continue;
      auto made = make_local_communicators(topology.dimensions[at].size);
      for (size_t i = 0; i < group.size(); ++i) {
        axis_groups[static_cast<size_t>(group[i])][at] = wrapped(std::move(made[i]));
      }
    }
  }
  Meshes out;
  auto flat = make_local_communicators(ranks);
  for (size_t r = 0; r < axis_groups.size(); ++r) {
    out.push_back(
        std::make_unique<MeshCommunicator>(topology, wrapped(std::move(flat[r])), axis_groups[r]));
  }
  return out;
}

inline Schedule schedule(const Topology& topology, std::vector<Route> routes,
                         MeshQueue queue = MeshQueue::fifo) {
  const MeshCollective collective{Collective::all_reduce, 1e6, std::move(routes), {}, 0, {}};
  const MeshRun run = simulate_mesh(topology, {collective}, {queue});
  return std::make_shared<MeshSchedule>(run.schedule(collective));
}

/// Every order of the dimensions of more than one rank.
inline std::vector<Route> orders(const Topology& topology) {
  Route all;
  for (int d = 0; d < topology.ndim(); ++d) {
    if (topology.dimensions[static_cast<size_t>(d)].size > 1) all.push_back(d);
  }
  std::vector<Route> out;
  do out.push_back(all);
  while (std::ranges::next_permutation(all).found);
  return out;
}

/// Of up to 9 chunks, with any routes.
inline Schedule random_schedule(const Topology& topology, Random& random) {
  const std::vector<Route> each = orders(topology);
  std::vector<Route> routes;
  for (int64_t chunk = random(1, 9); chunk > 0; --chunk) {
    routes.push_back(each[static_cast<size_t>(random(0, std::ssize(each) - 1))]);
  }
  return schedule(topology, routes, MeshQueue(random(0, 1)));
}

/// Completes late, in random order and from a thread of its own, which outlives what it delays.
class OwningLate final : public Communicator {
 public:
  OwningLate(std::unique_ptr<Communicator> inner, uint64_t seed)
      : inner_(std::move(inner)), late_(*inner_, seed) {}
  ~OwningLate() override { inner_.reset(); }

  int rank() const override { return late_.rank(); }
  int size() const override { return late_.size(); }
  void launch(const Request& request, Completion done) override {
    late_.launch(request, std::move(done));
  }

 private:
  std::unique_ptr<Communicator> inner_;
  LateCommunicator late_;
};

inline Wrap late(std::atomic<uint64_t>& seed) {
  return [&seed](std::unique_ptr<Communicator> inner) {
    return std::make_shared<OwningLate>(std::move(inner), seed++);
  };
}

template <typename T>
constexpr DType dtype_of = std::is_same_v<T, float>     ? DType::float32
                           : std::is_same_v<T, double>  ? DType::float64
                           : std::is_same_v<T, int32_t> ? DType::int32
                                                        : DType::int64;

/// Adds up spans in place; flat without a schedule.
template <typename T>
Request sum_of(std::vector<std::vector<T>>& spans, Schedule schedule) {
  Request out;
  out.kind = Collective::all_reduce;
  out.dtype = dtype_of<T>;
  for (auto& span : spans) out.recv.push_back({span.data(), std::ssize(span)});
  out.schedule = std::move(schedule);
  return out;
}

}  // namespace usbyte::test
