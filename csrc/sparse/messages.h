// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "rows.h"

namespace usbyte::sparse {

/// Messages of rows, one for each rank, this one's too.
class Outbox {
 public:
  /// Returns memory of so many bytes, on 8, that lives as long as the messages.
  using Allocate = std::function<std::byte*(int64_t bytes)>;

  /// With room for so many rows for each rank; keys for one are below `range(rank)`. In memory of
  /// its own unless `allocate` has some.
  Outbox(const SparseShape& shape, std::span<const int64_t> counts,
         const std::function<int64_t(int)>& range, const Allocate& allocate = {});

  void put(int rank, int64_t key, const std::byte* row) {
    writers_[static_cast<size_t>(rank)].put(key, row);
  }
  /// The same without the row, where all of a rank's are written to `values` by others.
  void put(int rank, int64_t key) { writers_[static_cast<size_t>(rank)].put(key); }
  std::byte* values(int rank) const { return writers_[static_cast<size_t>(rank)].values(); }
  std::span<const std::byte> message(int rank) const {
    return messages_[static_cast<size_t>(rank)];
  }
  int ranks() const { return static_cast<int>(writers_.size()); }
  /// The largest share of the rows that goes to one rank, times the ranks.
  double imbalance() const { return imbalance_; }

 private:
  Buffer memory_;
  std::vector<std::span<const std::byte>> messages_;  // by rank
  std::vector<RowsWriter> writers_;                   // likewise
  double imbalance_ = 1;
};

/// What all ranks have sent to this one, its own message among it; refers to that.
class Inbox {
 public:
  /// Sends each rank its message.
  Inbox(Exchange& exchange, const Outbox& sent, SparseTraffic& traffic);
  /// Sends all ranks one.
  Inbox(Exchange& exchange, const Buffer& sent, SparseTraffic& traffic);

  /// By rank; keys from one are below `range(rank)`.
  std::vector<RowsMessage> read(const SparseShape& shape,
                                const std::function<int64_t(int)>& range) const;

 private:
  Inbox(Exchange& exchange, const std::function<std::span<const std::byte>(int)>& message,
        SparseTraffic& traffic);

  std::vector<Buffer> memory_;
  std::vector<std::span<const std::byte>> messages_;  // by rank
};

/// The largest of so many counts' share of their sum, times their number.
double imbalance(std::span<const int64_t> counts);
double imbalance(std::span<const RowsMessage> messages);

}  // namespace usbyte::sparse
