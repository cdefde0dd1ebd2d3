// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <ostream>
#include <set>
#include <vector>

#include "ranks.h"
#include "support/half.h"
#include "usbyte/sparse.h"

namespace usbyte {

/// For messages of failing tests.
inline void PrintTo(const SparseScheme& scheme, std::ostream* out) { *out << scheme.name; }

}  // namespace usbyte

namespace usbyte::test {

/// Local exchanges that are there until the last rank is done with them, whichever is first.
inline std::vector<std::shared_ptr<Exchange>> shared_exchanges(int size) {
  std::vector<std::shared_ptr<Exchange>> out;
  for (auto& exchange : make_local_exchanges(size)) out.push_back(std::move(exchange));
  return out;
}

/// One rank's gradient: rows in any order, perhaps some of them more than once.
struct Rows {
  std::vector<int64_t> ids;
  std::vector<double> values;  // small integers, which every type adds exactly
};

/// Sums of all ranks' rows, by id.
using Reference = std::map<int64_t, std::vector<double>>;

inline Reference reference(const SparseShape& shape, const std::vector<Rows>& ranks) {
  Reference out;
  const auto width = static_cast<size_t>(shape.width);
  for (const Rows& rows : ranks) {
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      std::vector<double>& sum = out[rows.ids[i]];
      sum.resize(width);
      for (size_t e = 0; e < width; ++e) sum[e] += rows.values[i * width + e];
    }
  }
  return out;
}

/// Shares of all rows that are in the sums of 1, 2, ... ranks, the first ones.
inline SparseDensity density_of(const SparseShape& shape, const std::vector<Rows>& ranks) {
  SparseDensity out;
  std::set<int64_t> seen;
  for (const Rows& rows : ranks) {
    seen.insert(rows.ids.begin(), rows.ids.end());
    out.of_ranks.push_back(static_cast<double>(seen.size()) / static_cast<double>(shape.rows));
  }
  return out;
}

inline void store(std::byte* at, DType dtype, double value) {
  const auto put = [&](auto x) { std::memcpy(at, &x, sizeof x); };
  switch (dtype) {
    case DType::float64:
      return put(value);
    case DType::float16:
      return put(from_float<Half>(static_cast<float>(value)));
    case DType::bfloat16:
      return put(from_float<BFloat16>(static_cast<float>(value)));
    case DType::int32:
      return put(static_cast<int32_t>(value));
    case DType::int64:
      return put(static_cast<int64_t>(value));
    default:
      return put(static_cast<float>(value));
  }
}

inline double load(const std::byte* at, DType dtype) {
  const auto get = [&](auto x) {
    std::memcpy(&x, at, sizeof x);
    return x;
  };
  switch (dtype) {
    case DType::float64:
      return get(double{});
    case DType::float16:
      return to_float(get(Half{}));
    case DType::bfloat16:
      return to_float(get(BFloat16{}));
    case DType::int32:
      return get(int32_t{});
    case DType::int64:
      return static_cast<double>(get(int64_t{}));
    default:
      return get(float{});
  }
}

inline Buffer packed(const SparseShape& shape, const Rows& rows) {
  const int64_t each = itemsize(shape.dtype);
  Buffer out(std::ssize(rows.values) * each);
  for (size_t i = 0; i < rows.values.size(); ++i) {
    store(out.data() + static_cast<int64_t>(i) * each, shape.dtype, rows.values[i]);
  }
  return out;
}

/// Without rows of zeros.
inline Reference without_zeros(Reference sums) {
  std::erase_if(sums, [](const auto& row) {
    return std::ranges::all_of(row.second, [](double x) { return x == 0; });
  });
  return sums;
}

inline void expect_rows(const SparseShape& shape, const SparseRows& got, const Reference& want,
                        double factor = 1) {
  ASSERT_EQ(got.count(), std::ssize(want));
  ASSERT_EQ(got.values.size(), got.count() * shape.row_bytes());
  size_t i = 0;
  for (const auto& [id, sum] : want) {
    ASSERT_EQ(got.ids[i], id);
    for (size_t e = 0; e < sum.size(); ++e) {
      const size_t at = (i * sum.size() + e) * static_cast<size_t>(itemsize(shape.dtype));
      ASSERT_EQ(load(got.values.data() + at, shape.dtype), sum[e] * factor) << "row " << id;
    }
    ++i;
  }
}

/// The sums of all ranks, by rank; ranks are threads.
inline std::vector<SparseSum> all_reduce(const SparseScheme& scheme, const SparseShape& shape,
                                         const std::vector<Rows>& rows,
                                         const SparseOptions& options = {}) {
  const int size = static_cast<int>(rows.size());
  const auto exchanges = make_local_exchanges(size);
  std::vector<SparseSum> out(rows.size());
  on_each_rank(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const Buffer values = packed(shape, rows[r]);
    out[r] = scheme.all_reduce(*exchanges[r], shape, {rows[r].ids, values.data()}, options);
  });
  return out;
}

}  // namespace usbyte::test
