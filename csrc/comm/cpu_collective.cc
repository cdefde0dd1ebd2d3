// SPDX-License-Identifier: Apache-2.0
#include "cpu_collective.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "support/half.h"

namespace usbyte {
namespace {

constexpr int64_t kChunkBytes = 16 << 10;  // stays in the first-level cache while all ranks reduce

bool can_reduce(DType dtype) {
  return is_floating(dtype) || dtype == DType::int32 || dtype == DType::int64;
}

std::string text(ReduceOp op) {
  constexpr std::array<const char*, 4> kNames = {"sum", "min", "max", "product"};
  return kNames.at(static_cast<size_t>(op));
}

std::string counts(const std::vector<BufferView>& spans) {
  std::string out = "[";
  for (const BufferView& s : spans) out += (out.size() > 1 ? ", " : "") + std::to_string(s.count);
  return out + "]";
}

bool same_counts(const std::vector<BufferView>& a, const std::vector<BufferView>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const BufferView& x, const BufferView& y) { return x.count == y.count; });
}

template <typename T, typename Combine>
void combine_all(void* into, const void* from, int64_t count, Combine combine) {
  T* a = static_cast<T*>(into);
  const T* b = static_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) a[i] = combine(a[i], b[i]);
}

template <typename T>
void reduce_into(void* into, const void* from, int64_t count, ReduceOp op) {
  // Signed overflow is undefined; the unsigned type of the same size wraps to the same bits.
  using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                               std::type_identity<T>>::type;
  switch (op) {
    case ReduceOp::sum:
      return combine_all<T>(into, from, count, [](T a, T b) {
        return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
      });
    case ReduceOp::product:
      return combine_all<T>(into, from, count, [](T a, T b) {
        return static_cast<T>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
      });
    case ReduceOp::min:
      return combine_all<T>(into, from, count, [](T a, T b) { return b < a || b != b ? b : a; });
    case ReduceOp::max:
      return combine_all<T>(into, from, count, [](T a, T b) { return b > a || b != b ? b : a; });
  }
}

// In single precision, each result rounded, as torch and Gloo do.
template <typename T>
void reduce_halves(void* into, const void* from, int64_t count, ReduceOp op) {
  std::array<float, 256> a, b;
  T* const to = static_cast<T*>(into);
  const T* const with = static_cast<const T*>(from);
  for (int64_t begin = 0; begin < count; begin += std::ssize(a)) {
    const int64_t n = std::min(std::ssize(a), count - begin);
    for (int64_t i = 0; i < n; ++i) {
      a[static_cast<size_t>(i)] = to_float(to[begin + i]);
      b[static_cast<size_t>(i)] = to_float(with[begin + i]);
    }
    reduce_into<float>(a.data(), b.data(), n, op);
    for (int64_t i = 0; i < n; ++i) to[begin + i] = from_float<T>(a[static_cast<size_t>(i)]);
  }
}

void reduce_into(void* into, const void* from, int64_t count, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float16:
      return reduce_halves<Half>(into, from, count, op);
    case DType::bfloat16:
      return reduce_halves<BFloat16>(into, from, count, op);
    case DType::float32:
      return reduce_into<float>(into, from, count, op);
    case DType::float64:
      return reduce_into<double>(into, from, count, op);
    case DType::int32:
      return reduce_into<int32_t>(into, from, count, op);
    default:
      return reduce_into<int64_t>(into, from, count, op);
  }
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

using Requests = std::vector<const Request*>;

std::byte* element(const Requests& ranks, size_t rank, size_t span, int64_t index) {
  return static_cast<std::byte*>(ranks[rank]->recv[span].data) +
         index * itemsize(ranks[rank]->dtype);
}

// Reduces `range` of a span over all ranks into ranks [begin, end).
void reduce(const Requests& ranks, size_t span, Block range, size_t begin, size_t end) {
  if (ranks.size() == 1) return;
  alignas(64) std::array<std::byte, kChunkBytes> result;
  const Request& request = *ranks[0];
  const int64_t width = itemsize(request.dtype);
  for (int64_t i = range.begin; i < range.end; i += kChunkBytes / width) {
    const int64_t n = std::min(kChunkBytes / width, range.end - i);
    copy_bytes(result.data(), element(ranks, 0, span, i), n * width);
    for (size_t r = 1; r < ranks.size(); ++r) {
      reduce_into(result.data(), element(ranks, r, span, i), n, request.dtype, request.reduce);
    }
    for (size_t r = begin; r < end; ++r) {
      copy_bytes(element(ranks, r, span, i), result.data(), n * width);
    }
  }
}

void send_to_all(const Requests& ranks, size_t span, Block range, size_t from) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    copy_bytes(element(ranks, r, span, range.begin), element(ranks, from, span, range.begin),
               range.numel() * itemsize(ranks[0]->dtype));
  }
}

void all_to_all(const Requests& ranks) {
  const int64_t bytes = payload_bytes(*ranks[0]);
  const int64_t chunk = bytes / static_cast<int64_t>(ranks.size());
  // What a rank sends from the memory that it receives into is set aside before anything arrives.
  std::vector<std::vector<std::byte>> aside(ranks.size());
  std::vector<const std::byte*> sent;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const BufferView& send = ranks[r]->send[0];
    sent.push_back(static_cast<const std::byte*>(send.data));
    if (overlap(send, ranks[r]->recv[0], itemsize(ranks[r]->dtype))) {
      aside[r].assign(sent[r], sent[r] + bytes);
      sent[r] = aside[r].data();
    }
  }
  for (size_t to = 0; to < ranks.size(); ++to) {
    std::byte* out = element(ranks, to, 0, 0);
    for (size_t from = 0; from < ranks.size(); ++from, out += chunk) {
      copy_bytes(out, sent[from] + static_cast<int64_t>(to) * chunk, chunk);
    }
  }
}

}  // namespace

int64_t payload_bytes(const Request& request) {
  int64_t elements = 0;
  for (const BufferView& s : request.recv) elements += s.count;
  return elements * itemsize(request.dtype);
}

std::string difference(const Request& a, const Request& b) {
  const auto against = [](std::string what, std::string_view x, std::string_view y) {
    return what.append(" ").append(x).append(" against ").append(y);
  };
  if (a.kind != b.kind) return against("collective", name(a.kind), name(b.kind));
  if (a.kind == Collective::barrier) return "";
  if (a.dtype != b.dtype) return against("dtype", name(a.dtype), name(b.dtype));
  if (reduces(a.kind) && a.reduce != b.reduce) {
    return against("reduction", text(a.reduce), text(b.reduce));
  }
  if (a.kind == Collective::broadcast && a.root != b.root) {
    return against("root", std::to_string(a.root), std::to_string(b.root));
  }
  if (!same_counts(a.recv, b.recv)) return against("counts", counts(a.recv), counts(b.recv));
  if (a.kind == Collective::all_to_all && !same_counts(a.send, b.send)) {
    return against("send counts", counts(a.send), counts(b.send));
  }
  return "";
}

std::string problem(const Request& request, int size) {
  const std::string kind(name(request.kind));
  if (request.kind == Collective::barrier) return "";
  if (request.kind == Collective::sparse_all_reduce) return kNotARequest;
  if (request.scale != 1) return kind + ": the local communicator does not scale; do so first";
  if (reduces(request.kind) && !can_reduce(request.dtype)) {
    return kind + " of " + std::string(name(request.dtype)) +
           ": the local communicator reduces floats, int32 and int64; cast first";
  }
  if (request.kind == Collective::broadcast && (request.root < 0 || request.root >= size)) {
    return kind + ": root " + std::to_string(request.root) + " is not one of the " +
           std::to_string(size) + " ranks";
  }
  std::vector<BufferView> spans = request.recv;
  if (request.kind == Collective::all_to_all) {
    if (request.send.size() != 1 || spans.size() != 1 || request.send[0].count != spans[0].count ||
        spans[0].count % size != 0) {
      return kind + ": needs one send and one recv span of equal counts, a multiple of the " +
             std::to_string(size) + " ranks, not send " + counts(request.send) + " and recv " +
             counts(request.recv);
    }
    spans.push_back(request.send[0]);
  }
  for (const BufferView& s : spans) {
    if (s.count < 0) return kind + ": the count " + std::to_string(s.count) + " is negative";
    if (s.count > 0 && !s.data) {
      return kind + ": a span of " + std::to_string(s.count) + " elements has no memory";
    }
  }
  return "";
}

void execute(const Requests& ranks) {
  const Request& request = *ranks[0];
  if (request.kind == Collective::all_to_all) return all_to_all(ranks);
  if (request.kind == Collective::barrier) return;
  for (size_t s = 0; s < request.recv.size(); ++s) {
    const Block whole{0, request.recv[s].count};
    const auto shard_of = [&](size_t rank) {
      return shard(whole, static_cast<int>(rank), static_cast<int>(ranks.size()));
    };
    if (request.kind == Collective::all_reduce) {
      reduce(ranks, s, whole, 0, ranks.size());
    } else if (request.kind == Collective::broadcast) {
      send_to_all(ranks, s, whole, static_cast<size_t>(request.root));
    } else {
      for (size_t r = 0; r < ranks.size(); ++r) {
        if (request.kind == Collective::all_gather) send_to_all(ranks, s, shard_of(r), r);
        if (request.kind == Collective::reduce_scatter) reduce(ranks, s, shard_of(r), r, r + 1);
      }
    }
  }
}

}  // namespace usbyte
