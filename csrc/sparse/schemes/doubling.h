// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "sparse/rows.h"

namespace usbyte::sparse {

/// Sums by recursive doubling: in each round two groups of ranks, whose members have the same sums
/// each, exchange them in pairs, and are one group then. Ranks beyond the largest power of two give
/// theirs to another rank first, and get its result.
///
/// `grown` is called with every sum before it is sent.
SparseSum recursive_doubling(Exchange& exchange, const SparseShape& shape, SparseRows mine,
                             const std::function<void(Sums&)>& grown = {});

/// The sum of `bytes(density)` of what the busiest rank sends.
double doubling_bytes(int ranks, const SparseDensity& density,
                      const std::function<double(double)>& bytes);

/// Lengths and messages in each round.
int doubling_transfers(int ranks);

}  // namespace usbyte::sparse
