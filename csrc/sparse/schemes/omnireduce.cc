// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "push_pull.h"
#include "schemes.h"
#include "sparse/partitioners.h"

// OmniReduce (Fei et al., "Efficient Sparse Collective Communication and its Application to
// Accelerate Distributed Deep Learning", SIGCOMM 2021): the gradient as a line of blocks of 256
// elements, of which those travel that are not all zeros; each rank adds up one of as many equal
// ranges.
namespace usbyte::sparse {
namespace {

constexpr int64_t kBlock = 256;  // elements

SparseShape blocks_of(const SparseShape& shape) {
  return {(shape.rows * shape.width + kBlock - 1) / kBlock, kBlock, shape.dtype};
}

SparseSum run(Exchange& exchange, const SparseShape& shape, SparseRows mine, const SparseOptions&) {
  const SparseShape blocks = blocks_of(shape);
  const RangePartitioner servers(blocks.rows, exchange.size());
  SparseSum out = push_pull(exchange, blocks, recut(shape, mine, blocks), servers, false);
  out.rows = without_zeros(shape, recut(blocks, out.rows, shape));
  return out;
}

/// As of a parameter server; of blocks, each of which is there if any row in it is.
double bytes(int ranks, const SparseShape& shape, const SparseDensity& density) {
  const SparseShape blocks = blocks_of(shape);
  const double n = ranks, width = static_cast<double>(shape.width);
  // On average, those that reach into it from its neighbours included.
  const double per_block = 1 + static_cast<double>(kBlock - std::gcd(kBlock, shape.width)) / width;
  const auto full = [&](double d) { return 1 - std::pow(1 - d, per_block); };
  const double row = static_cast<double>(blocks.row_bytes()) + key_bytes(blocks);
  const FullestRange fullest(ranks, density);
  return (n - 1) / n * (full(fullest.of_one) + full(fullest.of_sum)) *
         static_cast<double>(blocks.rows) * row;
}

}  // namespace

const SparseScheme kOmniReduce = {"omnireduce", run, bytes, push_pull_transfers, false};

}  // namespace usbyte::sparse
