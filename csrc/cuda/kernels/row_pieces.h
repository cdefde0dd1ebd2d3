// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "grid.h"
#include "piece.h"

// What kernels share that work on rows of `columns` pieces of N elements: 16 bytes, aligned
// everywhere, or one element.
namespace usbyte::kernels {

/// Calls use(row, column) for the pieces of a thread; neighbours have neighbours.
template <typename Use>
USBYTE_HD void visit_pieces(GridIndex at, int64_t rows, int64_t columns, Use use) {
  // A division takes longer than most kernels' work: one for the start, one for the step.
  const auto start = static_cast<int64_t>(at.global());
  const auto step = static_cast<int64_t>(at.global_threads());
  const int64_t row_step = step / columns, column_step = step % columns;
  int64_t row = start / columns, column = start % columns;
  while (row < rows) {
    use(row, column);
    row += row_step;
    column += column_step;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
}

template <typename T, uint32_t N>
USBYTE_HD void load_piece(const T* from, T (&into)[N]) {
  if constexpr (N == 1) {
    into[0] = *from;
  } else {
    uint32_t words[4];
    load_aligned<kPieceBytes>(words, from);
    memcpy(into, words, kPieceBytes);
  }
}

template <typename T, uint32_t N>
USBYTE_HD void store_piece(T* into, const T (&values)[N]) {
  if constexpr (N == 1) {
    *into = values[0];
  } else {
    store_aligned(into, values);
  }
}

/// Calls `with(N, columns)` for rows of `width` elements, N being a type: pieces of 16 bytes if
/// rows of both arrays are such, else of one element.
template <typename T, typename With>
void with_pieces(const void* one, const void* other, int64_t width, With with) {
  constexpr uint32_t N = kPieceBytes / sizeof(T);
  const auto addresses = reinterpret_cast<uintptr_t>(one) | reinterpret_cast<uintptr_t>(other);
  if (addresses % kPieceBytes == 0 && width % N == 0) {
    with(std::integral_constant<uint32_t, N>{}, width / N);
  } else {
    with(std::integral_constant<uint32_t, 1>{}, width);
  }
}

}  // namespace usbyte::kernels
