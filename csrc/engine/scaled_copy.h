// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "usbyte/tensor.h"

namespace usbyte {

/// Writes `count` elements of `from`, multiplied with `scale`, to `to`, which may be the same place
/// but must not overlap otherwise. Products are those of torch: of doubles for float64, else of
/// floats, rounded once. Throws UsageError for integers.
void scaled_copy(DType dtype, const void* from, void* to, int64_t count, double scale);

}  // namespace usbyte
