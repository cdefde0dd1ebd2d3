// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "usbyte/codec_costs.h"
#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/sparse.h"

namespace usbyte {

/// What a scheme is predicted to cost.
struct SparseChoice {
  std::string scheme;
  int64_t bytes = 0;  ///< that the busiest rank sends or receives
  double seconds = 0;
};

/// Densities of sums of 1, 2, ... ranks, from those of one rank's and all ranks' gradients: as a
/// power of the number of ranks in between. One rank's is at least its share of all.
SparseDensity grown_density(int ranks, double of_one, double of_all);

/// Ways to add up such gradients that leave out no row and are not slowed by skew, the fastest
/// first. Transfers take what the rounds of a ring all_reduce take, bytes what its bytes do; adding
/// up takes no time. Throws UsageError on densities that are no shares or shrink.
std::vector<SparseChoice> sparse_choices(const NetworkModel& network, const SparseShape& shape,
                                         double of_one, double of_all);

/// The same by all densities.
std::vector<SparseChoice> sparse_choices(const NetworkModel& network, const SparseShape& shape,
                                         const SparseDensity& density);

/// The plan with schemes for those ops whose codecs pick elements and whose sums they are predicted
/// to bring in a tenth less time than gathering the messages does, coding by `costs` included; for
/// none that has one. Elements are taken to be picked independently by each rank, so that sums are
/// as dense as can be. Throws UsageError where costs of a codec are missing.
Plan with_schemes(const Plan& plan, const NetworkModel& network, const CodecCosts& costs);

}  // namespace usbyte
