// SPDX-License-Identifier: Apache-2.0
#pragma once

#ifndef __CUDA_ARCH__
#include <atomic>
#endif

#include "grid.h"

namespace usbyte::kernels {

/// What threads do to memory that they share. On the host too, so that threads of a test may run a
/// kernel. Relaxed, as on the device: a kernel's results are read by the next kernel.
struct Atomics {
  /// Returns what was there; `desired` is there now if that was `expected`.
  USBYTE_HD static int32_t compare_and_swap(int32_t* place, int32_t expected, int32_t desired) {
#ifdef __CUDA_ARCH__
    return atomicCAS(place, expected, desired);
#else
    std::atomic_ref(*place).compare_exchange_strong(expected, desired, std::memory_order_relaxed);
    return expected;
#endif
  }
  /// Returns what was there.
  USBYTE_HD static int32_t add(int32_t* place, int32_t value) {
#ifdef __CUDA_ARCH__
    return atomicAdd(place, value);
#else
    return std::atomic_ref(*place).fetch_add(value, std::memory_order_relaxed);
#endif
  }
};

}  // namespace usbyte::kernels
