// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cuda/event_pool.h"
#include "engine/cancellation_token.h"
#include "growing_memory.h"
#include "sparse/partitioned_rows.h"
#include "usbyte/communicator.h"
#include "usbyte/sparse.h"

namespace usbyte {

/// What a rank adds to a sum.
struct GivenRows {
  RowsView rows;
  const int64_t* count = nullptr;  // on a device, like the rows: how many are there; null: all
};

/// Brings rows from a device to the host, by copies on a stream of its own. For one thread, but
/// for `cancel`.
///
/// What is to be copied is waited for by the host, not on that stream: no copy is ever on its way
/// to memory here but one that is about to end.
class DeviceRows {
 public:
  explicit DeviceRows(std::shared_ptr<Cuda> cuda);
  ~DeviceRows();
  DeviceRows(const DeviceRows&) = delete;
  DeviceRows& operator=(const DeviceRows&) = delete;

  /// Before the network is aborted: what waits for the device does so no longer, and fails.
  void cancel() { cancellation_.cancel(); }
  // All of an op's rows are on the host until the next op begins. What waits for the device throws
  // FaultError after `cancel`.

  /// The next op begins, as `order` says.
  void begin(const StreamOrder& order);
  /// Its rows, partitioned among so many ranks and scaled; nothing if some have found no place,
  /// as when they crowd at few ranks, or some must be there twice: to be fetched then.
  std::optional<PartitionedRows> partition(const GivenRows& given, const SparseShape& shape,
                                           int ranks, const SparseOptions& options);
  /// Its rows as they are.
  RowsView fetch(const GivenRows& given, int64_t row_bytes);
  /// The op is over.
  void finish(const StreamOrder& order) { cuda_->record(order.done, stream_.get()); }

 private:
  /// Copies to the host; there behind the next `await_copies`.
  template <typename T>
  const T* bring(GrowingMemory& to, const T* from, int64_t count);
  void await_copies();

  CancellationToken cancellation_;
  const std::shared_ptr<Cuda> cuda_;
  EventPool events_;
  const OwnedStream stream_;
  const PooledEvent copied_;
  GrowingMemory table_, tallies_, dealt_ids_, positions_;  // the device's
  GrowingMemory counts_, ids_, rows_;                      // page-locked
};

}  // namespace usbyte
