// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "random_plan.h"
#include "ranks.h"
#include "support/half.h"
#include "usbyte/codec.h"
#include "usbyte/plan.h"

// Plans with codecs, and gradients in flat buffers of any dtype.
namespace usbyte::test {

inline constexpr const char* kCodecSpecs[] = {
    "none",      "fp16",      "bf16",    "fp8",        "int8",       "topk:0.2",
    "randk:0.3", "dct:0.2",   "dgc:0.2", "qsgd:4",     "terngrad",   "signsgd",
    "signum",    "efsignsgd", "onebit",  "powersgd:1", "powersgd:3", "int8,feedback=off"};

/// Of one element; small enough for every dtype.
inline float coded_gradient(int rank, int64_t step, int64_t element) {
  Random random(static_cast<uint64_t>(rank + 10 * step + 1000 * element));
  return static_cast<float>(random(-1000, 1000)) / 64;
}

/// Tensors of several dtypes, in all_reduces, reduce_scatters and all_gathers of random blocks,
/// each tensor with a codec.
inline Plan random_coded_plan(Random& random) {
  std::vector<TensorSpec> tensors = random_tensors(random.engine(), false);
  DType dtype = DType::float32;
  for (TensorSpec& t : tensors) {
    if (random.one_in(4)) {
      constexpr DType kTypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};
      dtype = kTypes[random(0, 3)];
    }
    t.dtype = dtype;
    const int64_t rows = random(1, 20);
    if (t.numel % rows == 0) t.rows = rows;
  }
  const Plan plain = random_plan(random.engine(), tensors);
  std::vector<std::string> codecs;
  for (size_t i = 0; i < tensors.size(); ++i) {
    codecs.emplace_back(kCodecSpecs[random(0, std::ssize(kCodecSpecs) - 1)]);
  }
  return with_codecs(plain, codecs);
}

/// The same plan, in which some of what can be is added up by schemes that add in order of ranks.
inline Plan with_random_schemes(const Plan& plan, Random& random) {
  std::vector<Op> ops = plan.ops();
  for (Op& op : ops) {
    constexpr const char* kSchemes[] = {"", "zen", "agsparse", "sparse_ps"};
    const auto codec = make_codec(op.codec);
    if (op.kind == Collective::all_reduce && codec && codec->selection()) {
      op.scheme = kSchemes[random(0, std::ssize(kSchemes) - 1)];
    }
  }
  return plan.with_ops(plan.policy(), std::move(ops));
}

/// Sets an element of a flat buffer; what its dtype can hold of the value.
inline void put(const Plan& plan, std::byte* flat_buffer, int64_t element, float value) {
  std::byte* const at = flat_buffer + plan.byte_offset(element);
  const auto store = [at](auto x) { std::memcpy(at, &x, sizeof x); };
  switch (plan.dtype({element, element + 1})) {
    case DType::float64:
      return store(static_cast<double>(value));
    case DType::float16:
      return store(from_float<Half>(value));
    case DType::bfloat16:
      return store(from_float<BFloat16>(value));
    default:
      return store(value);
  }
}

/// An element of a flat buffer.
inline float get(const Plan& plan, const std::byte* flat_buffer, int64_t element) {
  const std::byte* const at = flat_buffer + plan.byte_offset(element);
  const auto load = [at](auto x) {
    std::memcpy(&x, at, sizeof x);
    return x;
  };
  switch (plan.dtype({element, element + 1})) {
    case DType::float64:
      return static_cast<float>(load(double{}));
    case DType::float16:
      return to_float(load(Half{}));
    case DType::bfloat16:
      return to_float(load(BFloat16{}));
    default:
      return load(float{});
  }
}

}  // namespace usbyte::test
