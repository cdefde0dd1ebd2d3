#pragma once

#include "arithmetic.h"
#include "grid.h"
#include "piece.h"

namespace usbyte::kernels {

/// target[rows[i]] += values[i], for `count` rows of `columns` pieces of N elements; rows do not
/// decrease. N elements are 16 bytes, aligned everywhere, or one element.
///
/// The thread that has the first of equal rows adds them all, in order, so that no two threads
/// write one element and the result is always the same. Each addition is rounded to T.
template <typename T, uint32_t N>
struct ScatterAddKernel {
  T* target;
  const int64_t* rows;
  const T* values;
  int64_t count;
  int64_t columns;

  int64_t threads_wanted() const { return count * columns; }

  USBYTE_HD void operator()(GridIndex at) const {
    // A division takes longer than everything else here: one for the start, one for the step.
    const auto start = static_cast<int64_t>(at.global());
    const auto step = static_cast<int64_t>(at.global_threads());
    const int64_t row_step = step / columns, column_step = step % columns;
    int64_t row = start / columns, column = start % columns;
    while (row < count) {
      if (row == 0 || rows[row - 1] != rows[row]) add_rows(row, column);
      row += row_step;
      column += column_step;
      if (column >= columns) {
        column -= columns;
        ++row;
      }
    }
  }

 private:
  using Compute = Arithmetic<T>;

  USBYTE_HD void add_rows(int64_t row, int64_t column) const {
    T* const place = target + (rows[row] * columns + column) * N;
    T sum[N], value[N];
    load(place, sum);
    int64_t i = row;
    do {
      load(values + (i * columns + column) * N, value);
      USBYTE_UNROLL
      for (uint32_t e = 0; e < N; ++e) {
        sum[e] = Compute::store(Compute::load(sum[e]) + Compute::load(value[e]));
      }
      ++i;
    } while (i < count && rows[i] == rows[row]);
    if constexpr (N == 1) {
      *place = sum[0];
    } else {
      store_aligned(place, sum);
    }
  }

  USBYTE_HD static void load(const T* from, T (&into)[N]) {
    if constexpr (N == 1) {
      into[0] = *from;
    } else {
      uint32_t words[4];
      load_aligned<kPieceBytes>(words, from);
      memcpy(into, words, kPieceBytes);
    }
  }
};

}  // namespace usbyte::kernels
