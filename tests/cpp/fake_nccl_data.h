// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/nccl/nccl.h"
#include "support/half.h"

// What FakeNccl does with data.
namespace usbyte::test {

struct NcclCall {
  enum class Kind { all_reduce, reduce, reduce_scatter, all_gather, broadcast, send, recv };

  Kind kind;
  const void* in;
  void* out;
  size_t count;
  DType dtype;
  NcclReduction reduction = NcclReduction::sum;
  int peer = -1;  // root, or the other side
  double scale = 1;
};

inline double load(const void* memory, size_t i, DType dtype) {
  switch (dtype) {
    case DType::float32:
      return static_cast<const float*>(memory)[i];
    case DType::float64:
      return static_cast<const double*>(memory)[i];
    case DType::float16:
      return to_float(static_cast<const Half*>(memory)[i]);
    case DType::bfloat16:
      return to_float(static_cast<const BFloat16*>(memory)[i]);
    case DType::int32:
      return static_cast<const int32_t*>(memory)[i];
    case DType::int64:
      return static_cast<double>(static_cast<const int64_t*>(memory)[i]);
    case DType::int8:
      return static_cast<const int8_t*>(memory)[i];
    case DType::uint8:
      return static_cast<const uint8_t*>(memory)[i];
  }
  return 0;
}

inline void store(void* memory, size_t i, DType dtype, double value) {
  switch (dtype) {
    case DType::float32:
      static_cast<float*>(memory)[i] = static_cast<float>(value);
      break;
    case DType::float64:
      static_cast<double*>(memory)[i] = value;
      break;
    case DType::float16:
      static_cast<Half*>(memory)[i] = from_float<Half>(static_cast<float>(value));
      break;
    case DType::bfloat16:
      static_cast<BFloat16*>(memory)[i] = from_float<BFloat16>(static_cast<float>(value));
      break;
    case DType::int32:
      static_cast<int32_t*>(memory)[i] = static_cast<int32_t>(value);
      break;
    case DType::int64:
      static_cast<int64_t*>(memory)[i] = static_cast<int64_t>(value);
      break;
    case DType::int8:
      static_cast<int8_t*>(memory)[i] = static_cast<int8_t>(value);
      break;
    case DType::uint8:
      static_cast<uint8_t*>(memory)[i] = static_cast<uint8_t>(value);
      break;
  }
}

/// What keeps two ranks' calls from being one launch; empty if nothing does.
inline std::string difference(const std::vector<NcclCall>& a, const std::vector<NcclCall>& b) {
  if (a.size() != b.size()) return "ranks group other numbers of calls";
  for (size_t i = 0; i < a.size(); ++i) {
    const bool pairs = a[i].kind >= NcclCall::Kind::send;
    if (a[i].count != b[i].count || a[i].dtype != b[i].dtype) return "counts or dtypes differ";
    if (pairs != (b[i].kind >= NcclCall::Kind::send)) return "kinds differ";
    if (pairs) continue;
    if (a[i].kind != b[i].kind || a[i].peer != b[i].peer || a[i].reduction != b[i].reduction ||
        a[i].scale != b[i].scale) {
      return "kinds, roots or reductions differ";
    }
  }
  return "";
}

/// Does what all calls of one launch ask for. All that ranks read is taken before any of them is
/// written to.
inline void move_data(const std::map<int, std::vector<NcclCall>>& ranks) {
  std::vector<std::function<void()>> writes;
  const auto read = [&](const NcclCall& call, size_t begin, size_t count) {
    std::vector<double> out;
    for (size_t i = 0; i < count; ++i) out.push_back(load(call.in, begin + i, call.dtype));
    return out;
  };
  const auto write = [&](const NcclCall& call, size_t begin, std::vector<double> values) {
    writes.push_back([&call, begin, values = std::move(values)] {
      for (size_t i = 0; i < values.size(); ++i) store(call.out, begin + i, call.dtype, values[i]);
    });
  };
  const auto reduced = [&](size_t index, size_t begin, size_t count) {
    std::vector<double> out;
    for (const auto& [rank, calls] : ranks) {
      std::vector<double> its = read(calls[index], begin, count);
      for (double& v : its) v *= calls[index].scale;
      if (out.empty()) {
        out = std::move(its);
        continue;
      }
      for (size_t i = 0; i < count; ++i) {
        switch (calls[index].reduction) {
          case NcclReduction::sum:
            out[i] += its[i];
            break;
          case NcclReduction::product:
            out[i] *= its[i];
            break;
          case NcclReduction::max:
            out[i] = std::max(out[i], its[i]);
            break;
          case NcclReduction::min:
            out[i] = std::min(out[i], its[i]);
            break;
        }
      }
    }
    return out;
  };
  std::map<std::pair<int, int>, std::vector<const NcclCall*>> sent;  // by from and to, in order
  for (const auto& [rank, calls] : ranks) {
    for (const NcclCall& call : calls) {
      if (call.kind == NcclCall::Kind::send) sent[{rank, call.peer}].push_back(&call);
    }
  }
  std::map<std::pair<int, int>, size_t> received;
  for (const auto& [rank, calls] : ranks) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const NcclCall& call = calls[i];
      switch (call.kind) {
        case NcclCall::Kind::all_reduce:
          write(call, 0, reduced(i, 0, call.count));
          break;
        case NcclCall::Kind::reduce:
          if (rank == call.peer) write(call, 0, reduced(i, 0, call.count));
          break;
        case NcclCall::Kind::reduce_scatter:
          write(call, 0, reduced(i, static_cast<size_t>(rank) * call.count, call.count));
          break;
        case NcclCall::Kind::all_gather:
          for (const auto& [from, its] : ranks) {
            write(call, static_cast<size_t>(from) * call.count, read(its[i], 0, call.count));
          }
          break;
        case NcclCall::Kind::broadcast:
          write(call, 0, read(ranks.at(call.peer)[i], 0, call.count));
          break;
        case NcclCall::Kind::send:
          break;
        case NcclCall::Kind::recv: {
          const auto pair = std::make_pair(call.peer, rank);
          write(call, 0, read(*sent.at(pair).at(received[pair]++), 0, call.count));
          break;
        }
      }
    }
  }
  for (const auto& w : writes) w();
}

}  // namespace usbyte::test
