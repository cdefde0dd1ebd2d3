// SPDX-License-Identifier: Apache-2.0
#include "kernel_checks.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "support/half.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

void check_floating(DType dtype, const char* kernel) {
  if (is_floating(dtype)) return;
  throw UsageError(std::string(kernel) + " does not take " + std::string(name(dtype)) +
                   "; float32, float64, float16 and bfloat16 it does");
}

// What messages are whole numbers of.
DType word_of(GroupCodec codec) {
  using Kind = GroupCodec::Kind;
  const bool cast = codec.kind == Kind::fp16 || codec.kind == Kind::bf16;
  return cast ? DType::float16 : DType::float32;
}

void check_coded(DType dtype, const char* kernel) {
  if (is_floating(dtype) && dtype != DType::float64) return;
  throw UsageError(std::string(kernel) + " does not take " + std::string(name(dtype)) +
                   "; float32, float16 and bfloat16 it does");
}

void check_array(const void* memory, DType dtype, int64_t count, const char* what, size_t index) {
  const auto problem = [&](const std::string& text) {
    throw UsageError(std::string(what) + " of entry " + std::to_string(index) + " " + text);
  };
  if (count < 0) problem("has " + std::to_string(count) + " elements");
  if (count == 0) return;
  if (!memory) problem("is null but has " + std::to_string(count) + " elements");
  if (reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(itemsize(dtype)) != 0) {
    problem("is not aligned to its " + std::string(name(dtype)) + " elements");
  }
}

template <typename T>
uint64_t bits(T value) {
  uint64_t out = 0;
  std::memcpy(&out, &value, sizeof value);
  return out;
}

template <typename T>
uint64_t integer_bits(DType dtype, double value) {
  // The limits of int64 are not both doubles; 2^63 and -2^63 are.
  const double low = static_cast<double>(std::numeric_limits<T>::min());
  const double end = std::ldexp(1.0, std::numeric_limits<T>::digits);
  if (value >= low && value < end && value == std::trunc(value)) return bits(static_cast<T>(value));
  throw UsageError("fill value " + std::to_string(value) + " is no " + std::string(name(dtype)));
}

}  // namespace

void check_copy(std::span<const CopySegment> segments, DType from, DType to, double scale) {
  const bool plain = from == to && scale == 1;
  const bool floats = is_floating(from) && is_floating(to);
  const bool doubles = from == DType::float64 || to == DType::float64;
  if (!plain && (!floats || (doubles && from != to))) {
    throw UsageError("copy_segments cannot make " + std::string(name(to)) + " of " +
                     std::string(name(from)) + " with scale " + std::to_string(scale) +
                     "; it converts and scales float32, float16 and bfloat16, scales float64, and "
                     "copies equal types with scale 1");
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    check_array(segments[i].source, from, segments[i].count, "source", i);
    check_array(segments[i].target, to, segments[i].count, "target", i);
  }
}

uint64_t check_fill(const void* target, DType dtype, int64_t count, double value) {
  check_array(target, dtype, count, "fill target", 0);
  switch (dtype) {
    case DType::float32:
      return bits(static_cast<float>(value));
    case DType::float64:
      return bits(value);
    case DType::float16:
      return from_float<Half>(static_cast<float>(value)).bits;
    case DType::bfloat16:
      return from_float<BFloat16>(static_cast<float>(value)).bits;
    case DType::int32:
      return integer_bits<int32_t>(dtype, value);
    case DType::int64:
      return integer_bits<int64_t>(dtype, value);
    case DType::int8:
      return integer_bits<int8_t>(dtype, value);
    case DType::uint8:
      return integer_bits<uint8_t>(dtype, value);
  }
  throw UsageError("fill of an unknown dtype");
}

void check_scatter_add(const void* target, const int64_t* rows, const void* values, DType dtype,
                       int64_t count, int64_t width) {
  check_floating(dtype, "scatter_add");
  if (count < 0 || width < 0) throw UsageError("scatter_add of a negative count or width");
  check_array(target, dtype, count * width, "scatter_add target", 0);
  check_array(values, dtype, count * width, "scatter_add values", 0);
  check_array(rows, DType::int64, count, "scatter_add rows", 0);
}

void check_gather_rows(const void* target, const void* source, const int32_t* positions,
                       DType dtype, int64_t count, int64_t width, double scale) {
  if (scale != 1) check_floating(dtype, "gather_rows with a scale");
  if (count < 0 || width < 0) throw UsageError("gather_rows of a negative count or width");
  check_array(target, dtype, count * width, "gather_rows target", 0);
  check_array(source, dtype, count * width, "gather_rows source", 0);
  check_array(positions, DType::int32, count, "gather_rows positions", 0);
}

void check_partition(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                     int64_t most, const int32_t* table, const RowGroups& groups) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // positions are int32_t
  const RowPartition& p = partition;
  if (p.rows < 0 || p.rows > std::numeric_limits<int64_t>::max() / 2 || p.servers < 1 ||
      p.slots < 1 || p.slots > kMost || p.serial < 0 || p.serial > kMost || p.hashes < 1 ||
      p.hashes > kMostPartitionHashes || most < 0 || most > kMost) {
    throw UsageError("partition_rows of " + std::to_string(most) + " of " + std::to_string(p.rows) +
                     " rows by " + std::to_string(p.servers) + " servers with " +
                     std::to_string(p.slots) + " slots, " + std::to_string(p.serial) +
                     " serial places and " + std::to_string(p.hashes) +
                     " hashes; batches and regions have less than 2^31, hashes are 1 to " +
                     std::to_string(kMostPartitionHashes));
  }
  check_array(ids, DType::int64, most, "ids to partition", 0);
  if (count) check_array(count, DType::int64, 1, "count to partition", 0);
  check_array(table, DType::int32, p.table_size(), "table to partition", 0);
  check_array(groups.ids, DType::int64, most, "partitioned ids", 0);
  check_array(groups.positions, DType::int32, most, "partitioned positions", 0);
  check_array(groups.tallies, DType::int32, p.tallies_size(), "tallies of a partition", 0);
}

void check_encode(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype) {
  check_coded(dtype, "encode_groups");
  for (size_t i = 0; i < runs.size(); ++i) {
    const GroupEncoding& run = runs[i];
    check_array(run.values, dtype, run.count, "values to encode", i);
    check_array(run.message, word_of(codec), run.count, "message to encode", i);
    if (run.kept) check_array(run.kept, DType::float32, run.count, "memory to encode", i);
  }
}

void check_decode(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                  int64_t stride) {
  check_coded(dtype, "decode_groups");
  if (ranks < 1 || stride % itemsize(word_of(codec)) != 0) {
    throw UsageError("decode_groups of " + std::to_string(ranks) + " ranks, " +
                     std::to_string(stride) + " bytes from each other");
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    const GroupDecoding& run = runs[i];
    check_array(run.values, dtype, run.count, "values to decode", i);
    check_array(run.message, word_of(codec), run.count, "message to decode", i);
  }
}

void check_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options) {
  check_floating(dtype, "update_sgd");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SgdTensor& t = tensors[i];
    check_array(t.param, dtype, t.count, "SGD param", i);
    check_array(t.grad, dtype, t.count, "SGD grad", i);
    if (options.momentum != 0) check_array(t.momentum, dtype, t.count, "SGD momentum", i);
  }
}

void check_adam(std::span<const AdamTensor> tensors, DType dtype) {
  check_floating(dtype, "update_adam");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const AdamTensor& t = tensors[i];
    check_array(t.param, dtype, t.count, "Adam param", i);
    check_array(t.grad, dtype, t.count, "Adam grad", i);
    check_array(t.exp_avg, dtype, t.count, "Adam exp_avg", i);
    check_array(t.exp_avg_sq, dtype, t.count, "Adam exp_avg_sq", i);
    if (t.step < 1) {
      throw UsageError("Adam step of entry " + std::to_string(i) + " is " + std::to_string(t.step) +
                       "; steps are counted from 1");
    }
  }
}

}  // namespace usbyte
