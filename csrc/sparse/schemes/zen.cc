// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "push_pull.h"
#include "schemes.h"
#include "sparse/partitioned_rows.h"
#include "sparse/partitioners.h"

// Balanced parallelism (Zen, OSDI 2025): every row goes to the server that its id hashes to, so
// that each rank's rows are spread evenly, however they are skewed. As rows are dealt out, servers
// have the same number of ids, and a server's bitmap has one bit for each.
namespace usbyte::sparse {
namespace {

SparseSum run(Exchange& exchange, const SparseShape& shape, SparseRows mine,
              const SparseOptions& options) {
  const HashPartitioner servers(shape.rows, exchange.size(), options.seed);
  return push_pull(exchange, shape, std::move(mine), servers, true);
}

SparseSum run_partitioned(Exchange& exchange, const SparseShape& shape,
                          const PartitionedRows& mine) {
  SparseSum out;
  const Buffer own =
      add_up_pushed(exchange, shape, mine.messages(), mine.servers(), true, out.traffic);
  out.rows = pull(exchange, shape, own, mine.servers(), out.traffic);
  return out;
}

/// (n - 1) / n (2 d + d_n + 1 / 32) M b for single elements of 4 bytes, with the bitmap's bits;
/// keys where they are shorter.
double bytes(int ranks, const SparseShape& shape, const SparseDensity& density) {
  const double n = ranks, rows = static_cast<double>(shape.rows);
  const double row = static_cast<double>(shape.row_bytes()), key = key_bytes(shape);
  const double push = density.of(1) * rows * (row + key);
  const double pull = density.of(ranks) * rows * row;
  return (n - 1) / n * (push + pull + std::min(density.of(ranks) * rows * key, rows / 8));
}

}  // namespace

const SparseScheme kZen = {"zen", run, bytes, push_pull_transfers, true, run_partitioned};

}  // namespace usbyte::sparse
