// SPDX-License-Identifier: Apache-2.0
#include "cluster.h"

#include <bit>
#include <cmath>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {
namespace {

// ceil(log2 n)
double rounds(int ranks) { return std::bit_width(static_cast<unsigned>(ranks - 1)); }

// Those that go over a tree.
void add_trees(LinkCosts& costs, double latency_s, double s_per_byte) {
  const double steps = rounds(costs.ranks), n = costs.ranks;
  costs.gather = {steps * latency_s, (n - 1) / n * s_per_byte};
  costs.reduce = costs.broadcast = {steps * latency_s, steps * s_per_byte};
}

void check_ranks(int count, const char* what) {
  if (count < 1) {
    throw UsageError("cluster: " + std::to_string(count) + " " + what + "; one is the least");
  }
}

}  // namespace

const AlphaBeta& LinkCosts::of(StageKind kind) const {
  switch (kind) {
    case StageKind::all_reduce:
      return all_reduce;
    case StageKind::reduce_scatter:
      return reduce_scatter;
    case StageKind::all_gather:
      return all_gather;
    case StageKind::all_to_all:
      return all_to_all;
    case StageKind::reduce:
      return reduce;
    case StageKind::broadcast:
      return broadcast;
    case StageKind::gather:
      return gather;
    default:
      throw UsageError("a codec uses no link");
  }
}

LinkCosts LinkCosts::thakur(int ranks, double latency_s, double bytes_per_s) {
  check_ranks(ranks, "ranks");
  if (!(bytes_per_s > 0) || !(latency_s >= 0)) {
    throw UsageError("cluster: a link needs a positive speed and a latency that is not negative");
  }
  LinkCosts costs;
  costs.ranks = ranks;
  const double steps = ranks - 1, s_per_byte = 1 / bytes_per_s;
  const AlphaBeta half{steps * latency_s, steps / ranks * s_per_byte};
  costs.reduce_scatter = costs.all_gather = costs.all_to_all = half;
  costs.all_reduce = {2 * half.alpha_s, 2 * half.beta_s_per_byte};
  add_trees(costs, latency_s, s_per_byte);
  return costs;
}

LinkCosts LinkCosts::of(const NetworkModel& network) {
  network.validate();
  LinkCosts costs;
  costs.ranks = network.ranks;
  costs.all_reduce = network.cost(Collective::all_reduce, 1);
  costs.reduce_scatter = network.cost(Collective::reduce_scatter, 1);
  costs.all_gather = network.cost(Collective::all_gather, 1);
  costs.all_to_all = costs.reduce_scatter;
  if (network.ranks > 1) {
    const double n = network.ranks;
    add_trees(costs, costs.reduce_scatter.alpha_s / (n - 1),
              costs.reduce_scatter.beta_s_per_byte * n / (n - 1));
  }
  return costs;
}

CompressionCluster CompressionCluster::of(const NetworkModel& network,
                                          std::optional<CodecCosts> gpu,
                                          std::optional<CodecCosts> cpu) {
  CompressionCluster cluster;
  cluster.nodes = network.ranks;
  cluster.flat = LinkCosts::of(network);
  cluster.gpu = std::move(gpu);
  cluster.cpu = std::move(cpu);
  return cluster;
}

CompressionCluster CompressionCluster::thakur(int nodes, int ranks_per_node, double intra_latency_s,
                                              double intra_bytes_per_s, double inter_latency_s,
                                              double inter_bytes_per_s,
                                              std::optional<CodecCosts> gpu,
                                              std::optional<CodecCosts> cpu) {
  check_ranks(nodes, "nodes");
  check_ranks(ranks_per_node, "ranks in a node");
  CompressionCluster cluster;
  cluster.nodes = nodes;
  cluster.ranks_per_node = ranks_per_node;
  cluster.intra = LinkCosts::thakur(ranks_per_node, intra_latency_s, intra_bytes_per_s);
  cluster.inter = LinkCosts::thakur(nodes, inter_latency_s, inter_bytes_per_s);
  cluster.flat = nodes == 1
                     ? cluster.intra
                     : LinkCosts::thakur(cluster.ranks(), inter_latency_s, inter_bytes_per_s);
  if (cluster.two_levels()) {
    cluster.flat.all_to_all.beta_s_per_byte =
        ranks_per_node * cluster.inter.all_to_all.beta_s_per_byte;
  }
  cluster.gpu = std::move(gpu);
  cluster.cpu = std::move(cpu);
  return cluster;
}

CompressionJob CompressionJob::of(const Profile& profile, Overlap overlap,
                                  std::span<const std::string> codec_of) {
  profile.validate();
  if (!codec_of.empty() && codec_of.size() != profile.tensors.size()) {
    throw UsageError(std::to_string(codec_of.size()) + " codecs for " +
                     std::to_string(profile.tensors.size()) + " tensors");
  }
  const std::vector<double> due_s = due_times(profile, overlap);
  CompressionJob job;
  job.rest_s = profile.iteration_s() - profile.backward_end_s();
  for (int i : backward_order(profile)) {
    const auto t = static_cast<size_t>(i);
    job.tensors.push_back({profile.tensors[t].numel, profile.tensors[t].dtype, profile.ready_s[t],
                           profile.iteration_s() - due_s[t],
                           codec_of.empty() || codec_of[t].empty() ? "none" : codec_of[t]});
  }
  return job;
}

}  // namespace usbyte
