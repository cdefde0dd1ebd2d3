// SPDX-License-Identifier: Apache-2.0
#include "device_rows.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "usbyte/error.h"

namespace usbyte {

using Kind = GrowingMemory::Kind;

DeviceRows::DeviceRows(std::shared_ptr<Cuda> cuda)
    : cuda_(std::move(cuda)),
      events_(cuda_),
      stream_(cuda_, true),
      copied_(events_.acquire(EventKind::ordering)),
      table_(cuda_, Kind::device),
      tallies_(cuda_, Kind::device),
      dealt_ids_(cuda_, Kind::device),
      positions_(cuda_, Kind::device),
      counts_(cuda_, Kind::pinned),
      ids_(cuda_, Kind::pinned),
      rows_(cuda_, Kind::pinned) {}

DeviceRows::~DeviceRows() {
  try {
    cuda_->synchronize(stream_.get());
  } catch (const FaultError&) {
    // Then nothing runs on the device any more.
  }
}

void DeviceRows::begin(const StreamOrder& order) {
  for (CudaEvent event : order.after) cancellation_.await(*cuda_, event);
  cuda_->record(order.started, stream_.get());
}

std::optional<PartitionedRows> DeviceRows::partition(const GivenRows& given,
                                                     const SparseShape& shape, int ranks,
                                                     const SparseOptions& options) {
  const auto most = std::ssize(given.rows.ids);
  if (most > std::numeric_limits<int32_t>::max() / 4) return std::nullopt;
  const auto partition = RowPartition::of(shape.rows, ranks, options.seed, most);
  const RowGroups groups = {dealt_ids_.of<int64_t>(most), positions_.of<int32_t>(most),
                            tallies_.of<int32_t>(partition.tallies_size())};
  cuda_->partition_rows(partition, given.rows.ids.data(), given.count, most,
                        table_.of<int32_t>(partition.table_size()), groups, stream_.get());
  const int32_t* const tallies = bring(counts_, groups.tallies, 1 + ranks);
  await_copies();
  if (tallies[0] != 0) return std::nullopt;

  const std::vector<int64_t> counts(tallies + 1, tallies + 1 + ranks);
  const sparse::HashPartitioner servers(shape.rows, ranks, options.seed);
  for (int r = 0; r < ranks; ++r) {
    if (counts[static_cast<size_t>(r)] > servers.range(r)) return std::nullopt;
  }

  PartitionedRows out(shape, options.seed, counts,
                      [this](int64_t bytes) { return rows_.of<std::byte>(bytes); });
  int64_t all = 0;
  for (int r = 0; r < ranks; ++r) {
    const int64_t count = counts[static_cast<size_t>(r)];
    cuda_->gather_rows(out.values(r), given.rows.values, groups.positions + all, shape.dtype, count,
                       shape.width, options.scale, stream_.get());
    all += count;
  }
  const int64_t* const ids = bring(ids_, groups.ids, all);
  await_copies();
  out.name({ids, static_cast<size_t>(all)});
  return out;
}

RowsView DeviceRows::fetch(const GivenRows& given, int64_t row_bytes) {
  const auto most = std::ssize(given.rows.ids);
  int64_t count = most;
  if (given.count) {
    const int64_t* const counted = bring(counts_, given.count, 1);
    await_copies();
    count = *counted;
  }
  if (count < 0 || count > most) {
    throw FaultError("the device counts " + std::to_string(count) + " rows where " +
                     std::to_string(most) +
                     " have room: the gradient's memory was written to before its sum, or a kernel "
                     "failed, which CUDA_LAUNCH_BLOCKING=1 shows");
  }
  const int64_t* const ids = bring(ids_, given.rows.ids.data(), count);
  const std::byte* const rows = bring(rows_, given.rows.values, count * row_bytes);
  await_copies();
  return {{ids, static_cast<size_t>(count)}, rows};
}

template <typename T>
const T* DeviceRows::bring(GrowingMemory& to, const T* from, int64_t count) {
  T* const out = to.of<T>(count);
  cuda_->copy(out, from, static_cast<size_t>(count) * sizeof(T), stream_.get());
  return out;
}

void DeviceRows::await_copies() {
  cuda_->record(copied_.get(), stream_.get());
  cancellation_.await(*cuda_, copied_.get());
}

}  // namespace usbyte
