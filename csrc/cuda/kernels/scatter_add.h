// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arithmetic.h"
#include "row_pieces.h"

namespace usbyte::kernels {

/// target[rows[i]] += values[i], for `count` rows of `columns` pieces of N elements; rows do not
/// decrease.
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
    visit_pieces(at, count, columns, [&](int64_t row, int64_t column) {
      if (row == 0 || rows[row - 1] != rows[row]) add_rows(row, column);
    });
  }

 private:
  using Compute = Arithmetic<T>;

  USBYTE_HD void add_rows(int64_t row, int64_t column) const {
    T* const place = target + (rows[row] * columns + column) * N;
    T sum[N], value[N];
    load_piece(place, sum);
    int64_t i = row;
    do {
      load_piece(values + (i * columns + column) * N, value);
      USBYTE_UNROLL
      for (uint32_t e = 0; e < N; ++e) {
        sum[e] = Compute::store(Compute::load(sum[e]) + Compute::load(value[e]));
      }
      ++i;
    } while (i < count && rows[i] == rows[row]);
    store_piece(place, sum);
  }
};

}  // namespace usbyte::kernels
