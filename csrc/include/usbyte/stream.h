// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>

namespace usbyte {

/// A cudaStream_t, as torch and others hand it over; 0 is the legacy default stream.
struct CudaStream {
  uintptr_t handle = 0;
  auto operator<=>(const CudaStream&) const = default;
};

/// A cudaEvent_t.
struct CudaEvent {
  uintptr_t handle = 0;
  auto operator<=>(const CudaEvent&) const = default;
};

}  // namespace usbyte
