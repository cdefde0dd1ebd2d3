// SPDX-License-Identifier: Apache-2.0
#include "doubling.h"
#include "schemes.h"

// Hierarchical centralization (Zen, OSDI 2025, section 3): sums grow at every rank, in log2 n
// rounds.
namespace usbyte::sparse {
namespace {

SparseSum run(Exchange& exchange, const SparseShape& shape, SparseRows mine, const SparseOptions&) {
  return recursive_doubling(exchange, shape, std::move(mine));
}

/// 2 sum over i = 1 .. log2 n of d of 2^(i-1) ranks, M b for single elements of 4 bytes.
double bytes(int ranks, const SparseShape& shape, const SparseDensity& density) {
  const double row = static_cast<double>(shape.row_bytes()) + key_bytes(shape);
  return doubling_bytes(ranks, density,
                        [&](double d) { return d * static_cast<double>(shape.rows) * row; });
}

}  // namespace

const SparseScheme kHierarchical = {"hierarchical", run, bytes, doubling_transfers, true};

}  // namespace usbyte::sparse
