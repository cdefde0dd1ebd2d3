// SPDX-License-Identifier: Apache-2.0
#include "schemes.h"
#include "sparse/partitioners.h"
#include "sparse/rows.h"

// A dense ring: reduce_scatter, then all_gather, of all rows (Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", 2009).
namespace usbyte::sparse {
namespace {

class Ring {
 public:
  Ring(Exchange& exchange, const SparseShape& shape, Buffer& values)
      : exchange_(exchange),
        shape_(shape),
        values_(values),
        parts_(shape.rows, exchange.size()),
        rank_(exchange.rank()),
        size_(exchange.size()) {}

  SparseTraffic run() {
    const Buffer room(parts_.range(0) * shape_.row_bytes());
    for (int step = 1; step < size_; ++step) {
      const std::span<std::byte> into = part(rank_ - step - 1);
      const std::span<std::byte> coming(room.data(), into.size());
      pass(part(rank_ - step), coming);
      add(shape_.dtype, into, coming);
    }
    const std::span<std::byte> own = part(rank_);
    for (int step = 0; step < size_ - 1; ++step) pass(part(rank_ - step), part(rank_ - step - 1));
    return traffic_;
  }

 private:
  std::span<std::byte> part(int index) {
    const int server = (index + 2 * size_) % size_;
    return {values_.data() + parts_.begin(server) * shape_.row_bytes(),
            static_cast<size_t>(parts_.range(server) * shape_.row_bytes())};
  }
  /// To the next rank, and from the one before.
  void pass(std::span<const std::byte> leaving, std::span<std::byte> coming) {
    const int next = (rank_ + 1) % size_, before = (rank_ + size_ - 1) % size_;
    const Leg both[] = {{next, leaving, coming}};
    const Leg each[] = {{next, leaving, {}}, {before, {}, coming}};
    exchange_.transfer(next == before ? std::span<const Leg>(both) : each);
    traffic_.sent_bytes += std::ssize(leaving);
    traffic_.received_bytes += std::ssize(coming);
  }

  Exchange& exchange_;
  const SparseShape& shape_;
  Buffer& values_;
  const RangePartitioner parts_;
  const int rank_, size_;
  SparseTraffic traffic_;
};

SparseSum run(Exchange& exchange, const SparseShape& shape, SparseRows mine, const SparseOptions&) {
  Sums all = filled(shape, sums_of(shape, std::move(mine)));
  SparseSum out;
  out.traffic = Ring(exchange, shape, all.values).run();
  out.rows = without_zeros(shape, rows_of(std::move(all)));
  return out;
}

/// 2 (n - 1) / n M b.
double bytes(int ranks, const SparseShape& shape, const SparseDensity&) {
  return 2.0 * (ranks - 1) / ranks * static_cast<double>(shape.rows * shape.row_bytes());
}

int transfers(int ranks) { return 2 * (ranks - 1); }

}  // namespace

const SparseScheme kDenseRing = {"dense", run, bytes, transfers, false};

}  // namespace usbyte::sparse
