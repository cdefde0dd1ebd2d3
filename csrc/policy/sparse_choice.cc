#include "usbyte/sparse_choice.h"

#include <algorithm>
#include <cmath>

#include "usbyte/error.h"

namespace usbyte {

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
  const int n = network.ranks;
  const SparseDensity density = grown_density(n, of_one, of_all);
  const AlphaBeta ring = network.cost(Collective::all_reduce, 1);
  const double rounds = std::max(2 * (n - 1), 1);
  const double transfer_s = ring.latency_s() / rounds;
  // Of an all_reduce of m bytes, 2 (n - 1) / n of m go over each link.
  const double s_per_byte = ring.beta_s_per_byte * n / rounds;
  std::vector<SparseChoice> out;
  for (const SparseScheme& scheme : sparse_schemes()) {
    // Skew is not known here, and the server's formula without it is Zen's.
    if (!scheme.keeps_zeros || scheme.name == "sparse_ps") continue;
    const double bytes = n > 1 ? scheme.bytes(n, shape, density) : 0;
    out.push_back({std::string(scheme.name), static_cast<int64_t>(bytes),
                   scheme.transfers(n) * transfer_s + bytes * s_per_byte});
  }
  std::ranges::stable_sort(out, {}, &SparseChoice::seconds);
  return out;
}

}  // namespace usbyte
