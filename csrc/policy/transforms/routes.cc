// SPDX-License-Identifier: Apache-2.0
#include "routing.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "plan/dimension_path.h"

namespace usbyte {
namespace {

constexpr int kMostChunks = 64;
constexpr int64_t kLeastShard = 4096;  // bytes that a rank sends of a chunk in its last phase
constexpr double kAsFast = 1.03;
constexpr double kWorthwhile = 0.95;  // of the fixed order's time: else it stays
constexpr int64_t kSmallest = 1 << 16, kLargest = 1 << 28;  // bytes that costs are fitted to

bool has_lines(const NetworkModel& network) {
  return network.topology && std::ranges::count_if(network.topology->dimensions,
                                                   [](auto& d) { return d.size > 1; }) > 1;
}

double flat_s(const NetworkModel& network, int64_t bytes, size_t blocks) {
  if (network.one_shot.takes(Collective::all_reduce, bytes)) return network.one_shot.latency_s;
  const double pack_s = blocks > 1 ? network.pack_s_per_byte * static_cast<double>(bytes) : 0;
  return network.cost(Collective::all_reduce, 1).time_s(bytes) + pack_s;
}

// By chunks, the fixed order first.
std::vector<MeshChoice> priced(const Topology& topology, int64_t bytes) {
  const double size = static_cast<double>(bytes);
  std::vector<MeshChoice> out;
  double fixed_s = std::numeric_limits<double>::infinity();
  for (int chunks = 1; chunks <= kMostChunks; chunks *= 2) {
    if (chunks > 1 && bytes / chunks / topology.ranks() < kLeastShard) break;
    for (MeshChoice& choice : route_choices(topology, Collective::all_reduce, size, chunks,
                                            {ThemisLatency::once}, {MeshQueue::fifo, true})) {
      choice.seconds = simulate_schedule(topology, choice.schedule, size);
      if (choice.name == "fixed") fixed_s = std::min(fixed_s, choice.seconds);
      out.push_back(std::move(choice));
    }
  }
  for (MeshChoice& choice : out) choice.fixed_s = fixed_s;
  return out;
}

MeshChoice first_of_the_fastest(std::vector<MeshChoice> all) {
  const double least_s = std::ranges::min_element(all, {}, &MeshChoice::seconds)->seconds;
  return *std::ranges::find_if(
      all, [&](const MeshChoice& choice) { return choice.seconds <= kAsFast * least_s; });
}

}  // namespace

MeshChoice best_route(const Topology& topology, int64_t bytes) {
  std::vector<MeshChoice> all = priced(topology, bytes);
  const auto [others, end] =
      std::ranges::stable_partition(all, [](const MeshChoice& c) { return c.name == "fixed"; });
  MeshChoice best = first_of_the_fastest({all.begin(), others});
  MeshChoice other = first_of_the_fastest({others, end});
  return other.seconds < kWorthwhile * best.seconds ? other : best;
}

MeshChoice fixed_route(const Topology& topology, int64_t bytes) {
  std::vector<MeshChoice> all = priced(topology, bytes);
  std::erase_if(all, [](const MeshChoice& choice) { return choice.name != "fixed"; });
  return first_of_the_fastest(std::move(all));
}

Plan with_routes(const Plan& plan, const NetworkModel& network) {
  if (!has_lines(network)) return plan;
  std::map<std::pair<int64_t, size_t>, MeshChoice> found;  // by bytes and blocks
  std::vector<Op> ops = plan.ops();
  for (Op& op : ops) {
    if (op.kind != Collective::all_reduce || op.codec != "none" || op.dimension >= 0) continue;
    const int64_t bytes = plan.bytes(op);
    const size_t blocks = op.blocks.size();
    auto best = found.find({bytes, blocks});
    if (best == found.end()) {
      const Topology through = with_startups(*network.topology, blocks);
      best = found.emplace(std::pair(bytes, blocks), best_route(through, bytes)).first;
    }
    if (best->second.seconds < flat_s(network, bytes, blocks)) op.route = best->second.schedule;
  }
  return plan.with_ops(plan.policy(), std::move(ops));
}

NetworkModel routed_network(const NetworkModel& network) {
  NetworkModel out = network;
  out.topology.reset();
  if (!has_lines(network)) return out;
  std::vector<Sample> samples;
  for (int64_t bytes = kSmallest; bytes <= kLargest; bytes *= 2) {
    samples.push_back({bytes, best_route(*network.topology, bytes).seconds});
  }
  out.all_reduce = {fit_cost(samples).cost};
  return out;
}

}  // namespace usbyte
