// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "usbyte/codec.h"

namespace usbyte {

/// A run of elements to copy. Both sides are aligned to their element, to no more. Types, from and
/// to: float32, float16 and bfloat16 as one likes, multiplied in float32 and rounded once, to
/// nearest; float64 to itself, multiplied in float64; every type to itself with scale 1, when bytes
/// are moved as they are. Otherwise a NaN stays a NaN, but its payload may change. A target may be
/// its own source, if both types have one size.
struct CopySegment {
  const void* source = nullptr;
  void* target = nullptr;
  int64_t count = 0;  // elements
};

/// Segments that one launch takes; longer lists take several, and so do, with drivers older than
/// CUDA 12.1, those of more than 160.
constexpr int64_t kSegmentsPerLaunch = 1024;

/// A run of elements to encode.
struct GroupEncoding {
  const void* values = nullptr;
  float* kept = nullptr;         ///< codec state, `count` elements; null without
  std::byte* message = nullptr;  ///< aligned to 4 bytes, a cast's to 2
  int64_t count = 0;             // elements
  uint64_t key = 0;              ///< RngKey::own of the run
};

/// A run of elements to decode.
struct GroupDecoding {
  void* values = nullptr;
  const std::byte* message = nullptr;  ///< the first rank's, aligned likewise
  int64_t count = 0;                   // elements
};

/// How a batch of rows is grouped by the servers that they are dealt out to
/// (sparse/partitioners.h): by Zen's hierarchical hashing (OSDI 2025), into a table of each
/// server's slots, where a row has `hashes` tries, and its serial region for those that miss. Of
/// equal ids at most `hashes` do not miss.
struct RowPartition {
  int64_t rows = 0;    // of the matrix
  int servers = 0;     // the ranks
  uint64_t seed = 0;   // SparseOptions::seed
  int64_t slots = 0;   // of a server
  int64_t serial = 0;  // places of a server's serial region
  int32_t hashes = 3;  // at most kMostPartitionHashes

  /// With Zen's sizes: twice as many slots as rows are expected, and a tenth of those, but some, as
  /// what few rows need varies.
  static RowPartition of(int64_t rows, int servers, uint64_t seed, int64_t expected) {
    const int64_t slots = 2 * expected / (servers > 0 ? servers : 1) + 1;
    return {rows, servers, seed, slots, slots / 10 < 32 ? 32 : slots / 10};
  }

  int64_t table_size() const { return servers * (slots + serial); }  ///< elements
  int64_t tallies_size() const { return 1 + 3 * int64_t{servers}; }  ///< elements
};

constexpr int32_t kMostPartitionHashes = 4;

/// A batch by server: the lists of all, one behind the other, each in no particular order. On the
/// device; `ids` and `positions` have room for the batch.
struct RowGroups {
  int64_t* ids = nullptr;
  int32_t* positions = nullptr;  ///< in the batch
  /// The number of rows without a place; of each server how many rows it has; of each how many have
  /// missed all slots; and a scratch of as many. Unless the first is 0 not all rows are listed:
  /// more have missed than have room, ids are no rows, or the count exceeds the batch. The host can
  /// partition such a batch, or all ranks agree on a dense sum.
  int32_t* tallies = nullptr;
};

// The updates make the operations of torch.optim's foreach=True implementation on a device, in its
// order, each rounded to the parameters' type: results are the same bit for bit. (fused=True, and
// torch's own kernels on the CPU, fuse other operations, or none.) Parameters, gradients and state
// have one type: float32, float64, float16 or bfloat16. Gradients are not changed.

/// Hyper-parameters of torch.optim.SGD, as of one step.
struct SgdOptions {
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  double grad_scale = 1;  ///< multiplied with the gradient first, in its type
};

/// One parameter of a step. All have `count` elements; `momentum` is null without momentum.
struct SgdTensor {
  void* param = nullptr;
  const void* grad = nullptr;
  void* momentum = nullptr;
  int64_t count = 0;
  bool first = false;  ///< the momentum buffer is set to the gradient, not added to
};

/// Hyper-parameters of torch.optim.Adam, as of one step; `decoupled` makes it AdamW.
struct AdamOptions {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool decoupled = false;
  bool maximize = false;
  double grad_scale = 1;  ///< multiplied with the gradient first, in its type
};

/// One parameter of a step, which is its `step`-th, counted from 1.
struct AdamTensor {
  void* param = nullptr;
  const void* grad = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  int64_t count = 0;
  int64_t step = 1;
};

}  // namespace usbyte
