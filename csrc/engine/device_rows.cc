#include "device_rows.h"

#include <bit>
#include <string>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {

DeviceRows::DeviceRows(std::shared_ptr<Cuda> cuda)
    : cuda_(std::move(cuda)),
      events_(cuda_),
      stream_(cuda_, true),
      copied_(events_.acquire(EventKind::ordering)),
      count_(cuda_, sizeof(int64_t)) {}

DeviceRows::~DeviceRows() {
  try {
    cuda_->synchronize(stream_.get());
  } catch (const FaultError&) {
    // Then nothing runs on the device any more.
  }
}

RowsView DeviceRows::fetch(const GivenRows& given, int64_t row_bytes, const StreamOrder& order) {
  for (CudaEvent event : order.after) halt_.await(*cuda_, event);
  cuda_->record(order.started, stream_.get());
  const auto most = std::ssize(given.rows.ids);
  int64_t count = most;
  if (given.count) {
    cuda_->copy(count_.data(), given.count, sizeof count, stream_.get());
    await_copies();
    count = *reinterpret_cast<const int64_t*>(count_.data());
  }
  if (count < 0 || count > most) {
    throw FaultError("the device counts " + std::to_string(count) + " rows where " +
                     std::to_string(most) +
                     " have room: the gradient's memory was written to before its sum, or a kernel "
                     "failed, which CUDA_LAUNCH_BLOCKING=1 shows");
  }
  const auto ids = static_cast<size_t>(count) * sizeof(int64_t);
  const auto values = static_cast<size_t>(count * row_bytes);
  // Twice as much each time: to lock pages takes long.
  if (rows_.size() < static_cast<int64_t>(ids + values)) {
    rows_ = {};
    rows_ = HostBytes(cuda_, static_cast<int64_t>(std::bit_ceil(ids + values)));
  }
  cuda_->copy(rows_.data(), given.rows.ids.data(), ids, stream_.get());
  cuda_->copy(rows_.data() + ids, given.rows.values, values, stream_.get());
  await_copies();
  return {{reinterpret_cast<const int64_t*>(rows_.data()), static_cast<size_t>(count)},
          rows_.data() + ids};
}

void DeviceRows::await_copies() {
  cuda_->record(copied_.get(), stream_.get());
  halt_.await(*cuda_, copied_.get());
}

}  // namespace usbyte
