#include "usbyte/routes.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace usbyte {
namespace {

constexpr int kMostChunks = 64;
constexpr int64_t kLeastShard = 4096;  // bytes that a rank sends of a chunk in its last phase
constexpr double kAsFast = 1.01;
constexpr int64_t kSmallest = 1 << 16, kLargest = 1 << 28;  // bytes that costs are fitted to

bool has_lines(const NetworkModel& network) {
  return network.topology && std::ranges::count_if(network.topology->dimensions,
                                                   [](auto& d) { return d.size > 1; }) > 1;
}

double flat_s(const NetworkModel& network, int64_t bytes) {
  if (network.one_shot.takes(Collective::all_reduce, bytes)) return network.one_shot.latency_s;
  return network.cost(Collective::all_reduce, 1).time_s(bytes);
}

}  // namespace

MeshChoice best_route(const Topology& topology, int64_t bytes) {
  std::vector<MeshChoice> tried;
  double least_s = 0;
  for (int chunks = 1; chunks <= kMostChunks; chunks *= 2) {
    if (chunks > 1 && bytes / chunks / topology.ranks() < kLeastShard) break;
    tried.push_back(chosen_routes(topology, Collective::all_reduce, static_cast<double>(bytes),
                                  chunks));
    least_s = chunks == 1 ? tried.back().seconds : std::min(least_s, tried.back().seconds);
  }
  for (MeshChoice& choice : tried) {
    if (choice.seconds <= kAsFast * least_s) return std::move(choice);
  }
  return std::move(tried.front());
}

Plan with_routes(const Plan& plan, const NetworkModel& network) {
  if (!has_lines(network)) return plan;
  std::map<int64_t, MeshChoice> by_bytes;
  std::vector<Op> ops = plan.ops();
  for (Op& op : ops) {
    if (op.kind != Collective::all_reduce || op.codec != "none") continue;
    const int64_t bytes = plan.bytes(op);
    auto found = by_bytes.find(bytes);
    if (found == by_bytes.end()) {
      found = by_bytes.emplace(bytes, best_route(*network.topology, bytes)).first;
    }
    if (found->second.seconds < flat_s(network, bytes)) op.route = found->second.schedule;
  }
  return plan.with(plan.policy(), std::move(ops));
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
