// SPDX-License-Identifier: Apache-2.0
#include "usbyte/tensor.h"

#include <algorithm>
#include <array>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {
namespace {

struct Entry {
  DType dtype;
  std::string_view name;
  int64_t itemsize;
};

constexpr std::array<Entry, 8> kTypes = {{{DType::float32, "float32", 4},
                                          {DType::float64, "float64", 8},
                                          {DType::float16, "float16", 2},
                                          {DType::bfloat16, "bfloat16", 2},
                                          {DType::int32, "int32", 4},
                                          {DType::int64, "int64", 8},
                                          {DType::int8, "int8", 1},
                                          {DType::uint8, "uint8", 1}}};

const Entry& entry(DType dtype) { return kTypes.at(static_cast<size_t>(dtype)); }

constexpr std::array<std::string_view, 7> kCollectives = {
    "all_reduce", "reduce_scatter", "all_gather",       "broadcast",
    "all_to_all", "barrier",        "sparse_all_reduce"};

}  // namespace

int64_t itemsize(DType dtype) { return entry(dtype).itemsize; }

bool is_floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 ||
         dtype == DType::bfloat16;
}

std::string_view name(DType dtype) { return entry(dtype).name; }

DType dtype_from_name(std::string_view text) {
  for (const Entry& e : kTypes) {
    if (e.name == text) return e.dtype;
  }
  std::string known;
  for (const Entry& e : kTypes) known += (known.empty() ? "" : ", ") + std::string(e.name);
  throw UsageError("unknown dtype '" + std::string(text) + "'; known are " + known);
}

std::string_view name(Collective kind) { return kCollectives.at(static_cast<size_t>(kind)); }

bool reduces(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce_scatter;
}

Collective collective_from_name(std::string_view text) {
  auto it = std::find(kCollectives.begin(), kCollectives.end(), text);
  if (it == kCollectives.end()) {
    throw PlanError("unknown collective '" + std::string(text) + "'");
  }
  return static_cast<Collective>(it - kCollectives.begin());
}

}  // namespace usbyte
