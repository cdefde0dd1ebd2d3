// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "messages.h"
#include "partitioners.h"

namespace usbyte {

/// One rank's rows, none twice and scaled already, that a device has grouped by the ranks that
/// `HashPartitioner` deals them out to: messages to those ranks. Who makes it writes the rows
/// there, and names them, before it is used; a rank's rows are in the order of their ids in `name`.
class PartitionedRows {
 public:
  /// With so many rows for each rank.
  PartitionedRows(const SparseShape& shape, uint64_t seed, std::span<const int64_t> counts,
                  const sparse::Outbox::Allocate& allocate);

  /// Where a rank's rows go to, one behind the other.
  std::byte* values(int rank) const { return messages_.values(rank); }
  /// The ids of all, rank after rank; once. Throws FaultError if one is not its rank's.
  void name(std::span<const int64_t> ids);

  const sparse::HashPartitioner& servers() const { return servers_; }
  const sparse::Outbox& messages() const { return messages_; }
  /// How many are in each of as many equal ranges as ranks.
  std::span<const int64_t> in_ranges() const { return in_ranges_; }

 private:
  int64_t rows_;
  sparse::HashPartitioner servers_;
  sparse::RangePartitioner ranges_;
  std::vector<int64_t> counts_, in_ranges_;
  sparse::Outbox messages_;
};

}  // namespace usbyte
