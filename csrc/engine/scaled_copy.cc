// SPDX-License-Identifier: Apache-2.0
#include "scaled_copy.h"

#include <string>
#include <type_traits>

#include "support/half.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

template <typename T>
void copy(const void* from, void* to, int64_t count, double scale) {
  const T* const in = static_cast<const T*>(from);
  T* const out = static_cast<T*>(to);
  if constexpr (std::is_same_v<T, double>) {
    for (int64_t i = 0; i < count; ++i) out[i] = in[i] * scale;
  } else {
    const auto factor = static_cast<float>(scale);
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(to_float(in[i]) * factor);
  }
}

}  // namespace

void scaled_copy(DType dtype, const void* from, void* to, int64_t count, double scale) {
  switch (dtype) {
    case DType::float32:
      return copy<float>(from, to, count, scale);
    case DType::float64:
      return copy<double>(from, to, count, scale);
    case DType::float16:
      return copy<Half>(from, to, count, scale);
    case DType::bfloat16:
      return copy<BFloat16>(from, to, count, scale);
    default:
      break;
  }
  throw UsageError("gradients of " + std::string(name(dtype)) + " cannot be scaled");
}

}  // namespace usbyte
