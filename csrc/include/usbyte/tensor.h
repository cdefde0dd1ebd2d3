// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace usbyte {

/// Element types that collectives carry.
enum class DType : uint8_t { float32, float64, float16, bfloat16, int32, int64, int8, uint8 };

/// Bytes of one element.
int64_t itemsize(DType dtype);
/// float32, float64, float16 or bfloat16.
bool is_floating(DType dtype);
/// "float32", ... as numpy and torch spell it.
std::string_view name(DType dtype);
/// Inverse of `name`; throws UsageError on an unknown spelling.
DType dtype_from_name(std::string_view name);

/// Collective operations. A plan uses the first three, which have blocks, and sparse_all_reduce,
/// which no communicator knows; the others serve communicators and eager calls.
enum class Collective : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  barrier,
  sparse_all_reduce
};

std::string_view name(Collective kind);
/// Inverse of `name`; throws PlanError on an unknown spelling.
Collective collective_from_name(std::string_view name);

/// all_reduce and reduce_scatter.
bool reduces(Collective kind);

/// One gradient in the flat buffer. `offset` and `numel` are elements of the flat buffer; see Plan.
/// For codecs that factor matrices it is one of `rows`, which divide `numel`, one
/// behind the other.
///
/// With a `width` it is a sparse gradient instead, of `rows` rows of so many elements, most of
/// which are zeros: it has no elements in the flat buffer (`numel` is 0), and travels as the rows
/// it has.
struct TensorSpec {
  std::string name;
  int64_t numel = 0;
  DType dtype = DType::float32;
  int64_t offset = 0;
  int64_t rows = 1;
  int64_t width = 0;

  bool sparse() const { return width > 0; }
  int64_t cols() const { return numel / rows; }
  int64_t end() const { return offset + numel; }
  bool operator==(const TensorSpec&) const = default;
};

}  // namespace usbyte
