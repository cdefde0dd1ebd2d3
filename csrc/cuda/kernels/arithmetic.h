// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "support/half.h"

namespace usbyte::kernels {

/// a * b, rounded. nvcc fuses a product and a sum as it likes, and the host would not follow; it
/// leaves this alone. Where fusing is wanted, std::fma says so.
USBYTE_HD inline float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
USBYTE_HD inline double multiply(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

/// The type in which a T is computed with, and the way there and back.
template <typename T>
struct Arithmetic {
  using Type = float;
  USBYTE_HD static float load(T value) { return to_float(value); }
  USBYTE_HD static T store(float value) { return from_float<T>(value); }
};
template <>
struct Arithmetic<double> {
  using Type = double;
  USBYTE_HD static double load(double value) { return value; }
  USBYTE_HD static double store(double value) { return value; }
};

}  // namespace usbyte::kernels
