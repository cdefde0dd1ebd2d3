// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "copy.h"
#include "row_pieces.h"

namespace usbyte::kernels {

/// target[i] = convert(source[positions[i]]), for `count` rows of `columns` pieces of N elements.
template <typename Convert, uint32_t N>
struct GatherRowsKernel {
  using T = typename Convert::To;

  Convert convert;
  T* target;
  const T* source;
  const int32_t* positions;
  int64_t count;
  int64_t columns;

  int64_t threads_wanted() const { return count * columns; }

  USBYTE_HD void operator()(GridIndex at) const {
    visit_pieces(at, count, columns, [&](int64_t row, int64_t column) {
      T values[N];
      load_piece(source + (int64_t{positions[row]} * columns + column) * N, values);
      USBYTE_UNROLL
      for (uint32_t e = 0; e < N; ++e) values[e] = convert(values[e]);
      store_piece(target + (row * columns + column) * N, values);
    });
  }
};

}  // namespace usbyte::kernels
