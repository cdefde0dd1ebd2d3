// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "usbyte/topology.h"

namespace usbyte {

/// Up to four dimensions of up to 5 ranks, of all kinds; with `adding_up` some switches do that.
inline Topology random_topology(std::mt19937& rng, int least_ndim = 1, int least_size = 1,
                                bool adding_up = false) {
  const auto any = [&rng](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(rng);
  };
  Topology out;
  const int ndim = any(least_ndim, 4);
  for (int d = 0; d < ndim; ++d) {
    out.dimensions.push_back({"d" + std::to_string(d), any(least_size, 5), 1e9 * any(1, 20),
                              1e-7 * any(0, 20), static_cast<DimensionKind>(any(0, 2))});
    Dimension& added = out.dimensions.back();
    added.in_network_reduction =
        adding_up && added.kind == DimensionKind::switched && any(0, 1) == 1;
  }
  return out;
}

/// Any order of the dimensions with more than one rank.
inline Route random_route(const Topology& topology, std::mt19937& rng) {
  Route out;
  for (int d = 0; d < topology.ndim(); ++d) {
    if (topology.dimensions[static_cast<size_t>(d)].size > 1) out.push_back(d);
  }
  std::ranges::shuffle(out, rng);
  return out;
}

}  // namespace usbyte
