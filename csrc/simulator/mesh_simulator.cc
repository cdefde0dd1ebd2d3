// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "mesh_simulator.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr std::array<std::string_view, 2> kQueues = {"fifo", "scf"};

// What waits for a dimension, the next one first.
struct Waiting {
  double bytes;  // 0 where order does not go by size
  double since_s;
  ChunkPhase what;

  auto operator<=>(const Waiting&) const = default;
};

// A dimension is free again, or a chunk has arrived where its next phase begins.
struct Event {
  double at_s;
  int dimension;  // -1: an arrival
  ChunkPhase what;

  bool operator>(const Event& other) const {
    return std::tie(at_s, dimension, what) > std::tie(other.at_s, other.dimension, other.what);
  }
};

class Simulation {
 public:
  Simulation(const Topology& topology, const std::vector<MeshCollective>& collectives,
             const MeshOptions& options)
      : topology_(topology),
        collectives_(collectives),
        options_(options),
        waiting_(topology.dimensions.size()),
        free_(topology.dimensions.size(), true) {
    run_.dimensions.resize(topology.dimensions.size());
    run_.released_s.resize(collectives.size());
    run_.done_s.resize(collectives.size());
    followers_.resize(collectives.size());
    for (size_t c = 0; c < collectives.size(); ++c) prepare(c);
  }

  MeshRun run() {
    for (size_t c = 0; c < collectives_.size(); ++c) {
      if (awaited_[c] == 0) release(c);
    }
    while (!events_.empty()) {
      const double now_s = events_.top().at_s;
      // All that happens now comes before any dimension decides what is next.
      while (!events_.empty() && events_.top().at_s == now_s) {
        const Event event = events_.top();
        events_.pop();
        if (event.dimension >= 0) {
          free_[static_cast<size_t>(event.dimension)] = true;
        } else {
          arrive(event.what, now_s);
        }
      }
      for (size_t d = 0; d < free_.size(); ++d) start(d, now_s);
    }
    double moved = 0;
    for (const DimensionUse& use : run_.dimensions) moved += use.moved_bytes;
    const double possible = run_.finish_s * topology_.bytes_per_s();
    run_.utilization = possible > 0 ? moved / possible : 0;
    return std::move(run_);
  }

 private:
  void prepare(size_t c) {
    const MeshCollective& collective = collectives_[c];
    const std::string culprit = "mesh: collective " + std::to_string(c);
    if (!(collective.bytes >= 0 && std::isfinite(collective.bytes))) {
      throw UsageError(culprit + ": bytes are negative or not finite");
    }
    if (!(collective.release_s >= 0 && std::isfinite(collective.release_s))) {
      throw UsageError(culprit + ": release_s is negative or not finite");
    }
    for (const MeshDependency& earlier : collective.after) {
      if (earlier.collective < 0 || earlier.collective >= static_cast<int>(c)) {
        throw UsageError(culprit + " comes after collective " + std::to_string(earlier.collective) +
                         ", which is no earlier one");
      }
      if (!(earlier.delay_s >= 0 && std::isfinite(earlier.delay_s))) {
        throw UsageError(culprit + ": a delay is negative or not finite");
      }
      followers_[static_cast<size_t>(earlier.collective)].push_back({c, earlier.delay_s});
    }
    awaited_.push_back(collective.after.size());
    run_.released_s[c] = collective.release_s;
    if (collective.routes.empty()) throw UsageError(culprit + " has no routes, so no chunks");
    const Topology among = topology_.among(collective.sizes);
    const double bytes = collective.bytes / static_cast<double>(collective.routes.size());
    std::vector<std::vector<MeshPhase>>& chunks = chunks_.emplace_back();
    for (const Route& route : collective.routes) {
      chunks.push_back(mesh_phases(among, collective.kind, route, bytes));
    }
    left_.push_back(chunks.size());
  }

  const std::vector<MeshPhase>& phases(const ChunkPhase& at) const {
    return chunks_[static_cast<size_t>(at.collective)][static_cast<size_t>(at.chunk)];
  }

  void release(size_t c) {
    for (size_t chunk = 0; chunk < chunks_[c].size(); ++chunk) {
      events_.push({run_.released_s[c], -1, {static_cast<int>(c), static_cast<int>(chunk), 0}});
    }
  }

  void arrive(const ChunkPhase& at, double now_s) {
    const std::vector<MeshPhase>& way = phases(at);
    if (at.phase < std::ssize(way)) {
      const MeshPhase& next = way[static_cast<size_t>(at.phase)];
      const bool by_size = options_.queue == MeshQueue::smallest_chunk_first;
      waiting_[static_cast<size_t>(next.dimension)].insert(
          {by_size ? next.moved_bytes : 0, now_s, at});
      return;
    }
    const auto c = static_cast<size_t>(at.collective);
    if (--left_[c] > 0) return;
    run_.done_s[c] = now_s;
    run_.finish_s = std::max(run_.finish_s, now_s);
    for (const auto& [follower, delay_s] : followers_[c]) {
      double& released_s = run_.released_s[follower];
      released_s = std::max(released_s, now_s + delay_s);
      if (--awaited_[follower] == 0) release(follower);
    }
  }

  void start(size_t d, double now_s) {
    if (!free_[d] || waiting_[d].empty()) return;
    const ChunkPhase at = waiting_[d].begin()->what;
    waiting_[d].erase(waiting_[d].begin());
    const MeshPhase& phase = phases(at)[static_cast<size_t>(at.phase)];
    DimensionUse& use = run_.dimensions[d];
    use.busy_s += phase.transfer_s;
    use.startup_s += phase.startup_s;
    use.moved_bytes += phase.moved_bytes;
    use.order.push_back(at);
    free_[d] = false;
    const double done_s = now_s + phase.seconds();
    events_.push(
        {options_.startups_overlap ? now_s + phase.transfer_s : done_s, static_cast<int>(d), at});
    events_.push({done_s, -1, {at.collective, at.chunk, at.phase + 1}});
  }

  const Topology& topology_;
  const std::vector<MeshCollective>& collectives_;
  const MeshOptions& options_;
  std::vector<std::vector<std::vector<MeshPhase>>> chunks_;        // by collective, chunk, phase
  std::vector<size_t> left_;                                       // chunks, by collective
  std::vector<size_t> awaited_;                                    // earlier ones, by collective
  std::vector<std::vector<std::pair<size_t, double>>> followers_;  // and delays, by collective
  std::vector<std::set<Waiting>> waiting_;                         // by dimension
  std::vector<bool> free_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  MeshRun run_;
};

}  // namespace

std::string_view name(MeshQueue queue) { return kQueues.at(static_cast<size_t>(queue)); }

MeshQueue mesh_queue_from_name(std::string_view text) {
  const auto found = std::ranges::find(kQueues, text);
  if (found == kQueues.end()) {
    throw UsageError("mesh: unknown queue '" + std::string(text) + "'; known are fifo, scf");
  }
  return static_cast<MeshQueue>(found - kQueues.begin());
}

MeshRun simulate_mesh(const Topology& topology, const std::vector<MeshCollective>& collectives,
                      const MeshOptions& options) {
  topology.validate();
  return Simulation(topology, collectives, options).run();
}

MeshSchedule MeshRun::schedule(const MeshCollective& collective) const {
  if (done_s.size() != 1) {
    throw UsageError("mesh: a schedule of " + std::to_string(done_s.size()) + " collectives");
  }
  MeshSchedule out{collective.kind, collective.routes, {}};
  for (const DimensionUse& use : dimensions) out.order.push_back(use.order);
  return out;
}

double ideal_s(const Topology& topology, Collective kind, double bytes,
               const std::vector<int>& sizes) {
  topology.validate();
  const Topology among = topology.among(sizes);
  double speed = 0, slowest_s = 0;
  for (const Dimension& d : among.dimensions) {
    if (d.size == 1) continue;
    // Over what is moved for the same part of a vector elsewhere.
    const double share = d.moved_bytes(1, kind == Collective::all_reduce) / d.moved_bytes(1, false);
    speed += d.bytes_per_s / share;
    slowest_s = std::max(slowest_s, d.exchanged_bytes(bytes) / d.bytes_per_s);
  }
  if (kind == Collective::all_to_all || speed == 0) return slowest_s;
  const double moved = bytes * (1 - 1.0 / among.ranks());
  return (kind == Collective::all_reduce ? 2 : 1) * moved / speed;
}

}  // namespace usbyte
