// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/exchange.h"
#include "usbyte/tensor.h"

// All_reduces of gradients that are mostly zeros. A gradient is a matrix of which few rows are not
// zero: an embedding's, whose rows are vectors; or anything else, as rows of one element.
namespace usbyte {

/// Of the whole matrix; the same on all ranks.
struct SparseShape {
  int64_t rows = 0;
  int64_t width = 1;  ///< elements of a row
  DType dtype = DType::float32;

  int64_t row_bytes() const { return width * itemsize(dtype); }
};

/// Some rows of a matrix: their ids, ascending, none twice, and their values one row behind the
/// other.
struct SparseRows {
  std::vector<int64_t> ids;
  Buffer values;

  int64_t count() const { return std::ssize(ids); }
};

/// Rows as they come from a backward pass: in any order, and those of one id count as their sum.
struct RowsView {
  std::span<const int64_t> ids;
  const std::byte* values = nullptr;
};

/// Adds up what has one id. Throws UsageError on an id outside the matrix.
SparseRows coalesce(const SparseShape& shape, RowsView rows);

/// What a sum was for one rank.
struct SparseTraffic {
  int64_t sent_bytes = 0, received_bytes = 0;
  int64_t own_rows = 0;  ///< that this rank had, each once
  int64_t sum_rows = 0;  ///< that the sum has
  /// Of its rows, the share in the fullest of as many equal ranges as ranks, times their number.
  double skew = 1;
  /// Of its rows, the largest share that went to one rank, times the number of ranks; 1 is balance.
  double push_imbalance = 1;
  /// Of the sum's rows, the largest share that came from one rank, likewise.
  double pull_imbalance = 1;
};

struct SparseSum {
  SparseRows rows;
  SparseTraffic traffic;
};

struct SparseOptions {
  double scale = 1;   ///< multiplied with each rank's rows, of floats, before they are added
  uint64_t seed = 0;  ///< of what is drawn by chance; the same on all ranks
};

/// How densities grow with the number of ranks whose gradients are added. Shares of all rows that
/// are not zero.
struct SparseDensity {
  std::vector<double> of_ranks;  ///< entry k - 1: of the sum of k ranks' gradients, on average
  double skew = 1;  ///< share of the fullest of as many equal ranges as ranks, times their number

  double of(int ranks) const { return of_ranks[static_cast<size_t>(ranks - 1)]; }
};

/// Of gradients with rows drawn independently of each other's; any on average have as few in common
/// as these, or more.
SparseDensity independent_density(int ranks, double of_one);

/// Rows that a rank goes through to add up such gradients: its own when it sends them, about as
/// many when it adds them up, and those of the sum.
inline double rows_handled(const SparseShape& shape, const SparseDensity& density, int ranks) {
  return static_cast<double>(shape.rows) * (2 * density.of(1) + density.of(ranks));
}
/// What this machine takes for each of those, of one float32, s: the median of what fits into
/// `budget_s`, at least three tries.
double measure_row_s(double budget_s);

/// Rows that a device has dealt out to ranks (sparse/partitioned_rows.h).
class PartitionedRows;

/// One way to add up gradients of all ranks. All ranks use it with the same shape and options.
struct SparseScheme {
  std::string_view name;
  /// What `all_reduce` does with rows that are coalesced.
  SparseSum (*run)(Exchange& exchange, const SparseShape& shape, SparseRows mine,
                   const SparseOptions& options);
  /// Bytes that the busiest rank sends or receives, whichever is more, as published.
  double (*bytes)(int ranks, const SparseShape& shape, const SparseDensity& density);
  /// Transfers that follow each other.
  int (*transfers)(int ranks);
  /// Rows that come to zeros are part of the sum; else they are left out.
  bool keeps_zeros;
  /// The same with rows that a device has dealt out; null if the scheme does not deal them.
  SparseSum (*run_partitioned)(Exchange& exchange, const SparseShape& shape,
                               const PartitionedRows& mine) = nullptr;

  /// Throws UsageError, before anything is sent, on ids outside the matrix, and FaultError when a
  /// rank is lost or sends what makes no sense.
  SparseSum all_reduce(Exchange& exchange, const SparseShape& shape, RowsView mine,
                       const SparseOptions& options) const;
  /// The same with rows that a device has dealt out, which all ranks do by the same seed; whether
  /// a device has or not is for each rank to say. Throws UsageError without `run_partitioned`.
  SparseSum all_reduce_partitioned(Exchange& exchange, const SparseShape& shape,
                                   const PartitionedRows& mine) const;
};

/// All of them:
///  - "zen": balanced parallelism. Z. Wang et al., "Zen: Empowering Distributed Training with
///    Sparsity-driven Data Synchronization", OSDI 2025.
///  - "hierarchical": hierarchical centralization, of the same paper.
///  - "agsparse": an all_gather of all rows, as in Horovod.
///  - "sparcml": recursive doubling that goes over to dense sums. C. Renggli et al., "SparCML:
///    High-Performance Sparse Communication for Machine Learning", SC 2019.
///  - "omnireduce": blocks of 256 elements, in equal ranges. J. Fei et al., "Efficient Sparse
///    Collective Communication and its Application to Accelerate Distributed Deep Learning",
///    SIGCOMM 2021.
///  - "sparse_ps": a parameter server of equal ranges on all ranks.
///  - "dense": a ring of all rows.
std::span<const SparseScheme> sparse_schemes();
/// Throws UsageError that lists the names.
const SparseScheme& sparse_scheme(std::string_view name);

}  // namespace usbyte
