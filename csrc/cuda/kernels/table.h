// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "grid.h"
#include "piece.h"

// The arrays of a launch, passed as a kernel parameter: no copy to the device comes before the
// launch, and every thread reads it through the constant cache.
//
// The work is divided by pieces, the 16 aligned bytes that a thread writes at a time. Pieces are
// numbered through all entries; an entry's first and last may reach over its array's ends.
namespace usbyte::kernels {

/// What a launch can take on all drivers, and since CUDA 12.1, less what stands beside the table.
constexpr size_t kSmallTableBytes = 4096 - 64;
constexpr size_t kLargeTableBytes = 32764 - 64;

/// Elements of an entry at most, so that positions in it fit an int32_t.
constexpr int64_t kMostElements = int64_t{1} << 30;

/// What every entry derives from. Not initialised: a table is large, and little of it is used.
template <typename T>
struct Pieces {
  T* target;
  uint32_t count;        // elements
  uint32_t first_piece;  // pieces of all entries before

  /// Elements in a piece.
  static constexpr uint32_t kElements = kPieceBytes / sizeof(T);

  USBYTE_HD uint32_t skew() const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(target) % kPieceBytes / sizeof(T));
  }
  USBYTE_HD uint32_t pieces() const { return (skew() + count + kElements - 1) / kElements; }
  /// The element that opens a piece; of the first one it may lie before the array.
  USBYTE_HD int32_t element(uint32_t piece) const {
    return static_cast<int32_t>((piece - first_piece) * kElements) - static_cast<int32_t>(skew());
  }
};

template <typename EntryType, size_t Bytes>
struct Table {
  using Entry = EntryType;
  static constexpr uint32_t kCapacity = (Bytes - 8) / sizeof(Entry);

  uint32_t size;
  uint32_t pieces;
  Entry entries[kCapacity];

  /// The entry in [low, high] to which the piece belongs.
  USBYTE_HD uint32_t find(uint32_t piece, uint32_t low, uint32_t high) const {
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      if (entries[middle].first_piece <= piece) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

}  // namespace usbyte::kernels
