// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "table.h"

namespace usbyte::kernels {

/// `entry.count` elements of `value`.
template <typename T>
struct FillKernel {
  Pieces<T> entry;
  T value;

  int64_t threads_wanted() const { return entry.pieces(); }

  USBYTE_HD void operator()(GridIndex at) const {
    constexpr uint32_t N = Pieces<T>::kElements;
    T values[N];
    USBYTE_UNROLL
    for (uint32_t i = 0; i < N; ++i) values[i] = value;
    for (uint64_t p = at.global(); p < entry.pieces(); p += at.global_threads()) {
      put(entry.target, entry.element(static_cast<uint32_t>(p)), entry.count, values);
    }
  }
};

}  // namespace usbyte::kernels
