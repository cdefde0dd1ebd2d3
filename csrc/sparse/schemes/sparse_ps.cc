// SPDX-License-Identifier: Apache-2.0
#include "push_pull.h"
#include "schemes.h"
#include "sparse/partitioners.h"

// A sparse parameter server on all ranks: each adds up one of as many equal ranges, so that skewed
// rows crowd at few of them.
namespace usbyte::sparse {
namespace {

SparseSum run(Exchange& exchange, const SparseShape& shape, SparseRows mine, const SparseOptions&) {
  return push_pull(exchange, shape, std::move(mine), RangePartitioner(shape.rows, exchange.size()),
                   false);
}

/// 2 (n - 1) / n (d + d_n) s_n M b for single elements of 4 bytes: the fullest range's rank. As
/// published, but that the sum is not as skewed as a rank's rows.
double bytes(int ranks, const SparseShape& shape, const SparseDensity& density) {
  const double n = ranks;
  const double row = static_cast<double>(shape.row_bytes()) + key_bytes(shape);
  const FullestRange fullest(ranks, density);
  return (n - 1) / n * (fullest.of_one + fullest.of_sum) * static_cast<double>(shape.rows) * row;
}

}  // namespace

const SparseScheme kSparsePs = {"sparse_ps", run, bytes, push_pull_transfers, true};

}  // namespace usbyte::sparse
