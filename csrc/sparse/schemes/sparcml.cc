// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "doubling.h"
#include "schemes.h"

// SparCML's recursive doubling (Renggli et al., "SparCML: High-Performance Sparse Communication for
// Machine Learning", SC 2019, SSAR_Recursive_double): sums that have become so full that keys do
// not pay go on as dense ones.
namespace usbyte::sparse {
namespace {

bool goes_dense(const SparseShape& shape, double count) {
  const double row = static_cast<double>(shape.row_bytes());
  return count * (row + key_bytes(shape)) >= static_cast<double>(shape.rows) * row;
}

SparseSum run(Exchange& exchange, const SparseShape& shape, SparseRows mine, const SparseOptions&) {
  SparseSum out = recursive_doubling(exchange, shape, std::move(mine), [&](Sums& sums) {
    if (goes_dense(shape, static_cast<double>(sums.set.count()))) sums = filled(shape, sums);
  });
  out.rows = without_zeros(shape, std::move(out.rows));
  return out;
}

double bytes(int ranks, const SparseShape& shape, const SparseDensity& density) {
  const double row = static_cast<double>(shape.row_bytes()), rows = static_cast<double>(shape.rows);
  return doubling_bytes(ranks, density, [&](double d) {
    return goes_dense(shape, d * rows) ? rows * row : d * rows * (row + key_bytes(shape));
  });
}

}  // namespace

const SparseScheme kSparCml = {"sparcml", run, bytes, doubling_transfers, false};

}  // namespace usbyte::sparse
