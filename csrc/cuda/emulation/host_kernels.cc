// SPDX-License-Identifier: Apache-2.0
#include "host_kernels.h"

#include "cuda/kernels/launch.h"

namespace usbyte::host {
namespace {

struct RunOnHost {
  static bool large_tables() { return true; }

  template <typename Kernel>
  void operator()(const Kernel& kernel) const {
    kernels::GridIndex at{0, 0, kernels::blocks_for(kernel), kernels::kThreadsPerBlock<Kernel>};
    for (at.block = 0; at.block < at.blocks; ++at.block) {
      for (at.thread = 0; at.thread < at.threads; ++at.thread) kernel(at);
    }
  }
};

}  // namespace

void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale) {
  RunOnHost run;
  kernels::copy_segments(segments, from, to, scale, run);
}

void fill(void* target, DType dtype, int64_t count, double value) {
  RunOnHost run;
  kernels::fill(target, dtype, count, value, run);
}

void scatter_add(void* target, const int64_t* rows, const void* values, DType dtype, int64_t count,
                 int64_t width) {
  RunOnHost run;
  kernels::scatter_add(target, rows, values, dtype, count, width, run);
}

void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                 int64_t count, int64_t width, double scale) {
  RunOnHost run;
  kernels::gather_rows(target, source, positions, dtype, count, width, scale, run);
}

void partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                    int64_t most, int32_t* table, const RowGroups& groups) {
  RunOnHost run;
  kernels::partition_rows(partition, ids, count, most, table, groups, run);
}

void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype) {
  RunOnHost run;
  kernels::encode_groups(codec, runs, dtype, run);
}

void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                   int64_t stride) {
  RunOnHost run;
  kernels::decode_groups(codec, runs, dtype, ranks, stride, run);
}

void update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options) {
  RunOnHost run;
  kernels::update_sgd(tensors, dtype, options, run);
}

void update_adam(std::span<const AdamTensor> tensors, DType dtype, const AdamOptions& options) {
  RunOnHost run;
  kernels::update_adam(tensors, dtype, options, run);
}

}  // namespace usbyte::host
