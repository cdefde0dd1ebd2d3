#pragma once

#include <cstdint>
#include <memory>

#include "device_coding.h"
#include "halt.h"
#include "usbyte/communicator.h"
#include "usbyte/event_pool.h"
#include "usbyte/sparse.h"

namespace usbyte {

/// What a rank adds to a sum.
struct GivenRows {
  RowsView rows;
  const int64_t* count = nullptr;  // on a device, like the rows: how many are there; null: all
};

/// Brings rows from a device to the host, by copies on a stream of its own. For one thread, but
/// for `halt`.
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
  void halt() { halt_.set(); }
  /// The rows of an op that begins as `order` says, on the host until the next call. Throws
  /// FaultError after `halt`.
  RowsView fetch(const GivenRows& given, int64_t row_bytes, const StreamOrder& order);
  /// The op is over.
  void finish(const StreamOrder& order) { cuda_->record(order.done, stream_.get()); }

 private:
  void await_copies();

  Halt halt_;
  const std::shared_ptr<Cuda> cuda_;
  EventPool events_;
  const OwnedStream stream_;
  const PooledEvent copied_;
  const HostBytes count_;
  HostBytes rows_;  // ids, and values behind them
};

}  // namespace usbyte
