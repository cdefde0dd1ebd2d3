// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arithmetic.h"
#include "table.h"

namespace usbyte::kernels {

/// Moves elements as they are; T is an unsigned integer of their size.
template <typename T>
struct Same {
  using From = T;
  using To = T;
  USBYTE_HD T operator()(T value) const { return value; }
};

/// One multiplication in the type that holds both sides, then one rounding to the target's.
template <typename FromType, typename ToType>
struct Scaled {
  using From = FromType;
  using To = ToType;
  typename Arithmetic<From>::Type scale;

  USBYTE_HD To operator()(From value) const {
    return Arithmetic<To>::store(multiply(Arithmetic<From>::load(value), scale));
  }
};

template <typename From, typename To>
struct CopyEntry : Pieces<To> {
  const From* source;
};

/// target[i] = convert(source[i]) in every entry.
///
/// A block takes kUnroll pieces a thread at a time, from anywhere in the table: its first and last
/// piece's entries are searched for by all threads alike, each piece's own only if these differ.
template <typename Convert, size_t Bytes>
struct CopyKernel {
  using From = typename Convert::From;
  using To = typename Convert::To;
  using Entry = CopyEntry<From, To>;
  static constexpr uint32_t N = Entry::kElements;
  /// Loads in flight for each thread: 64 bytes.
  static constexpr uint32_t kUnroll = sizeof(From) > sizeof(To) ? 2 : 4;

  Convert convert;
  Table<Entry, Bytes> table;

  int64_t threads_wanted() const { return (int64_t{table.pieces} + kUnroll - 1) / kUnroll; }

  USBYTE_HD void operator()(GridIndex at) const {
    const uint32_t step = at.threads * kUnroll;
    for (uint64_t begin = uint64_t{at.block} * step; begin < table.pieces;
         begin += uint64_t{at.blocks} * step) {
      const auto first = static_cast<uint32_t>(begin);
      const uint32_t last = table.pieces - first > step ? first + step - 1 : table.pieces - 1;
      const uint32_t low = table.find(first, 0, table.size - 1);
      const uint32_t high = table.find(last, low, table.size - 1);
      copy(first + at.thread, at.threads, last, low, high);
    }
  }

 private:
  USBYTE_HD void copy(uint32_t first, uint32_t stride, uint32_t last, uint32_t low,
                      uint32_t high) const {
    Fetched<From, N> fetched[kUnroll];
    uint32_t entries[kUnroll];
    USBYTE_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t piece = first + u * stride;
      if (piece > last) break;
      entries[u] = table.find(piece, low, high);
      const Entry& entry = table.entries[entries[u]];
      fetched[u].fetch(entry.source, entry.element(piece), entry.count);
    }
    USBYTE_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t piece = first + u * stride;
      if (piece > last) break;
      const Entry& entry = table.entries[entries[u]];
      From values[N];
      To converted[N];
      fetched[u].get(values);
      USBYTE_UNROLL
      for (uint32_t i = 0; i < N; ++i) converted[i] = convert(values[i]);
      put(entry.target, entry.element(piece), entry.count, converted);
    }
  }
};

}  // namespace usbyte::kernels
