// SPDX-License-Identifier: Apache-2.0
#include "buffer_floats.h"

#include <algorithm>
#include <type_traits>

#include "support/half.h"

namespace usbyte {
namespace {

float widened(double x) { return static_cast<float>(x); }
template <typename T>
float widened(T x) {
  return to_float(x);
}

template <typename T>
void load_as(const std::byte* from, std::span<float> to) {
  const T* const values = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < to.size(); ++i) to[i] = widened(values[i]);
}

template <typename T>
void store_as(std::span<const float> from, std::byte* to) {
  T* const values = reinterpret_cast<T*>(to);
  for (size_t i = 0; i < from.size(); ++i) {
    if constexpr (std::is_same_v<T, double>) {
      values[i] = from[i];
    } else {
      values[i] = from_float<T>(from[i]);
    }
  }
}

}  // namespace

std::span<float> BufferFloats::load(Block block) {
  const std::span<float> out = room(block);
  if (block.numel() == 0) return out;
  const std::byte* const from = flat_buffer_ + plan_.byte_offset(block.begin);
  const DType dtype = plan_.dtype(block);
  if (dtype == DType::float64) load_as<double>(from, out);
  if (dtype == DType::float16) load_as<Half>(from, out);
  if (dtype == DType::bfloat16) load_as<BFloat16>(from, out);
  return out;
}

std::span<float> BufferFloats::room(Block block) {
  const auto count = static_cast<size_t>(block.numel());
  if (count == 0) return {};
  if (plan_.dtype(block) == DType::float32) {
    return {reinterpret_cast<float*>(flat_buffer_ + plan_.byte_offset(block.begin)), count};
  }
  converted_.resize(std::max(converted_.size(), count));
  return {converted_.data(), count};
}

void BufferFloats::store(Block block, std::span<const float> values) {
  if (block.numel() == 0) return;
  std::byte* const to = flat_buffer_ + plan_.byte_offset(block.begin);
  const DType dtype = plan_.dtype(block);
  if (dtype == DType::float64) store_as<double>(values, to);
  if (dtype == DType::float16) store_as<Half>(values, to);
  if (dtype == DType::bfloat16) store_as<BFloat16>(values, to);
}

}  // namespace usbyte
