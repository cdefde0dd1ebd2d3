// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "row_set.h"
#include "usbyte/sparse.h"

// Messages of rows, and their sums. Rows have keys here, numbers below a `range` that sender and
// receiver know; for some schemes those are the ids themselves.
namespace usbyte::sparse {

/// What it takes to send rows: a head, then keys, then values, each on 8 bytes.
int64_t message_bytes(const SparseShape& shape, int64_t range, int64_t count);

/// Writes such a message, row by row, or the keys alone, when others write as many rows.
class RowsWriter {
 public:
  RowsWriter() = default;
  /// At `message`, which has `message_bytes` for it.
  RowsWriter(std::byte* message, const SparseShape& shape, int64_t range, int64_t count);

  void put(int64_t key, const std::byte* row) {
    std::memcpy(values_ + row_bytes_ * written_, row, static_cast<size_t>(row_bytes_));
    put(key);
  }
  void put(int64_t key) {
    if (wide_) {
      std::memcpy(keys_ + 8 * written_, &key, 8);
    } else {
      const auto narrow = static_cast<uint32_t>(key);
      std::memcpy(keys_ + 4 * written_, &narrow, 4);
    }
    ++written_;
  }
  std::byte* values() const { return values_; }

 private:
  std::byte* keys_ = nullptr;
  std::byte* values_ = nullptr;
  int64_t row_bytes_ = 0, written_ = 0;
  bool wide_ = false;
};

/// Rows that have arrived, or are to be sent; refers to the message.
struct RowsMessage {
  Keys keys;
  const std::byte* values = nullptr;
  Buffer listed;  // keys of a message that has a bitmap

  int64_t count() const { return keys.count(); }
};

/// Reads a message of either form. Throws FaultError, which names the peer, on one that is damaged.
RowsMessage read(std::span<const std::byte> message, const SparseShape& shape, int64_t range,
                 int peer);

/// Rows and their sums, by ascending key.
struct Sums {
  RowSet set;
  Buffer values;
};

/// A message of sums, keys ascending. Without keys where it has all of the range; with `bitmaps`, a
/// bit for each number of the range where that is shorter.
Buffer write_set(const SparseShape& shape, int64_t range, const Sums& sums, bool bitmaps);

/// A message of rows, whose keys are their ids.
Buffer write_rows(const SparseShape& shape, const SparseRows& rows);

/// Adds up messages in their order, which alone decides how sums are rounded.
Sums add_up(const SparseShape& shape, int64_t range, std::span<const RowsMessage> messages);

/// The same for messages that have no key in common.
Sums put_together(const SparseShape& shape, int64_t range, std::span<const RowsMessage> messages);

/// The same rows and zeros for all others.
Sums filled(const SparseShape& shape, const Sums& sums);

/// The same but for rows of zeros.
SparseRows without_zeros(const SparseShape& shape, SparseRows rows);

/// The same elements of a line of rows as other rows, with zeros where there are none.
SparseRows recut(const SparseShape& from, const SparseRows& rows, const SparseShape& to);

/// Adds elements, which are as many.
void add(DType dtype, std::span<std::byte> into, std::span<const std::byte> from);

/// Multiplies elements. Throws UsageError for integers unless by 1.
void scale(const SparseShape& shape, Buffer& values, double factor);

/// What a key takes in a message, bytes.
inline double key_bytes(const SparseShape& shape) {
  return static_cast<double>(Keys::width(shape.rows));
}

/// A set as `SparseRows`, and back; keys are ids.
SparseRows rows_of(Sums sums);
Sums sums_of(const SparseShape& shape, SparseRows rows);

}  // namespace usbyte::sparse
