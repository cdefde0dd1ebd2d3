// SPDX-License-Identifier: Apache-2.0
#include "schemes.h"
#include "sparse/messages.h"

// AGsparse, as in Horovod: everybody sends all its rows to everybody, and adds up alone.
namespace usbyte::sparse {
namespace {

SparseSum run(Exchange& exchange, const SparseShape& shape, SparseRows mine, const SparseOptions&) {
  SparseSum out;
  const Buffer own = write_rows(shape, mine);
  const Inbox arrived(exchange, own, out.traffic);
  Sums sums = add_up(shape, shape.rows, arrived.read(shape, [&](int) { return shape.rows; }));
  out.rows = rows_of(std::move(sums));
  return out;
}

/// 2 (n - 1) d M b for single elements of 4 bytes.
double bytes(int ranks, const SparseShape& shape, const SparseDensity& density) {
  const double row = static_cast<double>(shape.row_bytes()) + key_bytes(shape);
  return (ranks - 1) * density.of(1) * static_cast<double>(shape.rows) * row;
}

int transfers(int) { return 2; }  // lengths and messages

}  // namespace

const SparseScheme kAgSparse = {"agsparse", run, bytes, transfers, true};

}  // namespace usbyte::sparse
