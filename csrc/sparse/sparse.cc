// SPDX-License-Identifier: Apache-2.0
#include "usbyte/sparse.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "partitioned_rows.h"
#include "sparse/schemes/schemes.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {

SparseRows coalesce(const SparseShape& shape, RowsView rows) {
  const sparse::RowsMessage given{sparse::Keys(rows.ids), rows.values, {}};
  return sparse::rows_of(sparse::add_up(shape, shape.rows, std::span(&given, 1)));
}

SparseDensity independent_density(int ranks, double of_one) {
  SparseDensity out;
  for (double none = 1; std::ssize(out.of_ranks) < ranks;) {
    out.of_ranks.push_back(1 - (none *= 1 - of_one));
  }
  return out;
}

namespace {

// With so many rows of this rank's own in each of as many equal ranges as ranks.
SparseSum counted(SparseSum sum, std::span<const int64_t> in_range) {
  sum.traffic.own_rows = std::accumulate(in_range.begin(), in_range.end(), int64_t{0});
  sum.traffic.sum_rows = sum.rows.count();
  sum.traffic.skew = sparse::imbalance(in_range);
  return sum;
}

}  // namespace

SparseSum SparseScheme::all_reduce(Exchange& exchange, const SparseShape& shape, RowsView mine,
                                   const SparseOptions& options) const {
  SparseRows rows = coalesce(shape, mine);
  sparse::scale(shape, rows.values, options.scale);
  const sparse::RangePartitioner ranges(shape.rows, exchange.size());
  std::vector<int64_t> in_range;
  for (auto at = rows.ids.begin(); std::ssize(in_range) < exchange.size();) {
    const int64_t end = ranges.begin(static_cast<int>(in_range.size()) + 1);
    const auto next = std::lower_bound(at, rows.ids.end(), end);
    in_range.push_back(next - at);
    at = next;
  }
  return counted(run(exchange, shape, std::move(rows), options), in_range);
}

SparseSum SparseScheme::all_reduce_partitioned(Exchange& exchange, const SparseShape& shape,
                                               const PartitionedRows& mine) const {
  if (!run_partitioned) {
    throw UsageError("the sparse scheme '" + std::string(name) + "' does not partition rows");
  }
  return counted(run_partitioned(exchange, shape, mine), mine.in_ranges());
}

double measure_row_s(double budget_s) {
  constexpr int64_t kIds = 1 << 16, kOneIn = 64;
  const SparseShape shape{kIds * kOneIn, 1, DType::float32};
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < kIds; ++i) {
    ids.push_back(i * kOneIn + static_cast<int64_t>(mix(static_cast<uint64_t>(i)) % kOneIn));
  }
  const std::vector<float> values(ids.size(), 1.0F);
  const RowsView rows{ids, reinterpret_cast<const std::byte*>(values.data())};
  const auto alone = make_local_exchanges(1);
  std::vector<double> times;
  const double end = now_s() + budget_s;
  while (times.size() < 3 || now_s() < end) {
    const double start = now_s();
    sparse::kZen.all_reduce(*alone[0], shape, rows, {});
    times.push_back(now_s() - start);
  }
  std::ranges::nth_element(times, times.begin() + std::ssize(times) / 2);
  return times[times.size() / 2] / rows_handled(shape, {{1.0 / kOneIn}}, 1);
}

std::span<const SparseScheme> sparse_schemes() {
  static const std::array kSchemes = {sparse::kZen,      sparse::kHierarchical, sparse::kAgSparse,
                                      sparse::kSparCml,  sparse::kOmniReduce,   sparse::kSparsePs,
                                      sparse::kDenseRing};
  return kSchemes;
}

const SparseScheme& sparse_scheme(std::string_view name) {
  const std::span<const SparseScheme> all = sparse_schemes();
  const auto found = std::ranges::find(all, name, &SparseScheme::name);
  if (found != all.end()) return *found;
  std::string known;
  for (const SparseScheme& s : all) known += (known.empty() ? "" : ", ") + std::string(s.name);
  throw UsageError("unknown sparse scheme '" + std::string(name) + "'; known are " + known);
}

}  // namespace usbyte
