// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <type_traits>
#include <vector>

#include "random_plan.h"
#include "ranks.h"
#include "usbyte/plan.h"

// Random plans to train with, and gradients whose exact sum is known.
namespace usbyte::test {

/// The same plan with its all_gathers dealt anew: blocks that were scattered together need not be
/// gathered together, nor in one op.
inline Plan regather(const Plan& plan, Random& random) {
  std::vector<Op> ops;
  std::map<DType, std::vector<Block>> scattered;
  const auto gather_some = [&] {
    const auto from = std::next(scattered.begin(), random(0, std::ssize(scattered) - 1));
    std::vector<Block>& pool = from->second;
    std::shuffle(pool.begin(), pool.end(), random.engine());
    Op op{Collective::all_gather, {}, random(1, 600), random.one_in(5)};
    for (int64_t n = random(1, 4); n > 0 && !pool.empty(); --n) {
      op.blocks.push_back(pool.back());
      pool.pop_back();
    }
    if (pool.empty()) scattered.erase(from);
    ops.push_back(std::move(op));
  };
  for (const Op& op : plan.ops()) {
    if (op.kind == Collective::all_gather) continue;
    ops.push_back(op);
    if (op.kind == Collective::reduce_scatter) {
      std::vector<Block>& pool = scattered[plan.dtype(op.blocks[0])];
      pool.insert(pool.end(), op.blocks.begin(), op.blocks.end());
    }
    if (!scattered.empty() && random.one_in(3)) gather_some();
  }
  while (!scattered.empty()) gather_some();
  return Plan(plan.policy(), plan.tensors(), std::move(ops));
}

/// The gradient of one rank: any number, the same for the same arguments.
template <typename T>
T gradient(int rank, int64_t step, int64_t element) {
  uint64_t x = static_cast<uint64_t>(rank) * 0x9E3779B97F4A7C15U +
               static_cast<uint64_t>(step) * 0xC2B2AE3D27D4EB4FU +
               static_cast<uint64_t>(element) * 0x165667B19E3779F9U;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9U;
  x ^= x >> 32;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(x);
  } else {
    return static_cast<T>(static_cast<int64_t>(x % 200'001) - 100'000) / T{977};
  }
}

/// Its sum over the ranks, in rank order.
template <typename T>
T gradient_sum(int ranks, int64_t step, int64_t element) {
  T sum = gradient<T>(0, step, element);
  for (int r = 1; r < ranks; ++r) {
    const T next = gradient<T>(r, step, element);
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      sum = static_cast<T>(static_cast<U>(sum) + static_cast<U>(next));
    } else {
      sum += next;
    }
  }
  return sum;
}

/// Calls `body` with a zero of the C++ type of `dtype`.
template <typename Body>
void with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::float32:
      return body(float{});
    case DType::float64:
      return body(double{});
    case DType::int32:
      return body(int32_t{});
    default:
      return body(int64_t{});
  }
}

inline void write_gradient(const Plan& plan, std::byte* flat_buffer, int tensor, int rank,
                           int64_t step) {
  const TensorSpec& spec = plan.tensors()[static_cast<size_t>(tensor)];
  with_type(spec.dtype, [&]<typename T>(T) {
    std::byte* out = flat_buffer + plan.byte_offset(spec.offset);
    for (int64_t i = 0; i < spec.numel; ++i) {
      const T value = gradient<T>(rank, step, spec.offset + i);
      std::memcpy(out + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
    }
  });
}

/// Fails the test once if an element of the tensor is not, bit for bit, the sum over the ranks.
inline void expect_sum(const Plan& plan, const std::byte* flat_buffer, int tensor, int ranks,
                       int64_t step) {
  const TensorSpec& spec = plan.tensors()[static_cast<size_t>(tensor)];
  with_type(spec.dtype, [&]<typename T>(T) {
    const std::byte* in = flat_buffer + plan.byte_offset(spec.offset);
    int64_t wrong = 0;
    for (int64_t i = 0; i < spec.numel; ++i) {
      const T want = gradient_sum<T>(ranks, step, spec.offset + i);
      wrong += std::memcmp(in + i * static_cast<int64_t>(sizeof(T)), &want, sizeof(T)) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0) << spec.name << " of " << spec.numel << " elements, step " << step;
  });
}

}  // namespace usbyte::test
