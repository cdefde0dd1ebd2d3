// SPDX-License-Identifier: Apache-2.0
#include "sparse_choice.h"

#include <algorithm>
#include <cmath>

#include "simulator/coding_thread.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr double kClearly = 0.1;  // share of the time

// What a transfer and a byte of it take, s.
struct Link {
  explicit Link(const NetworkModel& network) {
    const AlphaBeta ring = network.cost(Collective::all_reduce, 1);
    const double rounds = std::max(2 * (network.ranks - 1), 1);
    transfer_s = ring.latency_s() / rounds;
    // Of an all_reduce of m bytes, 2 (n - 1) / n of m go over each link.
    s_per_byte = ring.beta_s_per_byte * network.ranks / rounds;
  }
  double time_s(int transfers, double bytes) const {
    return transfers * transfer_s + bytes * s_per_byte;
  }

  double transfer_s, s_per_byte;
};

}  // namespace

SparseDensity grown_density(int ranks, double of_one, double of_all) {
  SparseDensity out;
  of_one = std::max(of_one, of_all / ranks);  // a rank that had none is not like the others
  const double power = ranks > 1 && of_one > 0
                           ? std::log(of_all / of_one) / std::log(static_cast<double>(ranks))
                           : 0;
  for (int k = 1; k <= ranks; ++k) {
    out.of_ranks.push_back(of_one * std::pow(static_cast<double>(k), power));
  }
  return out;
}

std::vector<SparseChoice> sparse_choices(const NetworkModel& network, const SparseShape& shape,
                                         double of_one, double of_all) {
  if (!(of_one >= 0 && of_one <= of_all && of_all <= 1)) {
    throw UsageError("sparse_choices: densities of " + std::to_string(of_one) +
                     " and, of all ranks, " + std::to_string(of_all) +
                     " are no shares of the rows that grow");
  }
  return sparse_choices(network, shape, grown_density(network.ranks, of_one, of_all));
}

std::vector<SparseChoice> sparse_choices(const NetworkModel& network, const SparseShape& shape,
                                         const SparseDensity& density) {
  const int n = network.ranks;
  const Link link(network);
  std::vector<SparseChoice> out;
  for (const SparseScheme& scheme : sparse_schemes()) {
    // Skew is not known here, and the server's formula without it is Zen's.
    if (!scheme.keeps_zeros || scheme.name == "sparse_ps") continue;
    const double bytes = n > 1 ? scheme.bytes(n, shape, density) : 0;
    out.push_back({std::string(scheme.name), static_cast<int64_t>(bytes),
                   link.time_s(scheme.transfers(n), bytes)});
  }
  std::ranges::stable_sort(out, {}, &SparseChoice::seconds);
  return out;
}

Plan with_schemes(const Plan& plan, const NetworkModel& network, const CodecCosts& costs) {
  const int n = network.ranks;
  if (n == 1) return plan;
  const Link link(network);
  std::vector<Op> ops = plan.ops();
  for (Op& op : ops) {
    const auto codec = make_codec(op.codec);
    if (op.kind != Collective::all_reduce || !codec || !codec->selection() || !op.scheme.empty() ||
        op.dimension >= 0) {
      continue;
    }
    const auto [kind, bytes] = plan.traffic(op, n);
    const double received = static_cast<double>(bytes) * (n - 1) / n;
    // Either may be what the network does better than measured, or modelled.
    const double gathered_s =
        std::min(network.cost(kind, 1).time_s(bytes), link.time_s(1, received)) +
        CodingThread::times_of(plan, op, costs, n).decode_s;
    const SparseChoice best = sparse_choices(network, plan.shape(op), plan.density(op, n)).front();
    Op by_scheme = op;
    by_scheme.scheme = best.scheme;
    const double added_up_s =
        best.seconds + CodingThread::times_of(plan, by_scheme, costs, n).decode_s;
    if (added_up_s < (1 - kClearly) * gathered_s) op = std::move(by_scheme);
  }
  return plan.with_ops(plan.policy(), std::move(ops));
}

}  // namespace usbyte
