// SPDX-License-Identifier: Apache-2.0
#include "partitioned_rows.h"

#include <string>

#include "usbyte/error.h"

namespace usbyte {

PartitionedRows::PartitionedRows(const SparseShape& shape, uint64_t seed,
                                 std::span<const int64_t> counts,
                                 const sparse::Outbox::Allocate& allocate)
    : rows_(shape.rows),
      servers_(shape.rows, static_cast<int>(counts.size()), seed),
      ranges_(shape.rows, static_cast<int>(counts.size())),
      counts_(counts.begin(), counts.end()),
      in_ranges_(counts.size()),
      messages_(shape, counts, [this](int rank) { return servers_.range(rank); }, allocate) {}

void PartitionedRows::name(std::span<const int64_t> ids) {
  auto id = ids.begin();
  for (int rank = 0; rank < messages_.ranks(); ++rank) {
    for (int64_t i = 0; i < counts_[static_cast<size_t>(rank)]; ++i, ++id) {
      const bool inside = *id >= 0 && *id < rows_;
      const auto [server, key] = inside ? servers_.place(*id) : sparse::Place{-1, 0};
      if (server != rank) {
        throw FaultError("the device has partitioned row " + std::to_string(*id) + " of " +
                         std::to_string(rows_) + " to rank " + std::to_string(rank) +
                         (inside ? ", where rank " + std::to_string(server) + " adds it up" : "") +
                         ": the gradient's memory was written to before its sum, or a kernel "
                         "failed, which CUDA_LAUNCH_BLOCKING=1 shows");
      }
      messages_.put(rank, key);
      ++in_ranges_[static_cast<size_t>(ranges_.place(*id).server)];
    }
  }
}

}  // namespace usbyte
