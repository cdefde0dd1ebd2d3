// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <cstddef>
#include <vector>

#include "run_on_device.h"

namespace usbyte::device {

cudaError_t load() {
  // Arguments that need each kernel once. What they point to is not looked at.
  alignas(16) static std::byte place[32];
  const CopySegment segment{place, place, 1};
  const SgdTensor sgd{place, place, place, 1, false};
  const AdamTensor adam{place, place, place, place, 1, 1};
  const DType all[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16,
                       DType::uint8};
  int64_t row = 0;
  int32_t number = 0;
  Load run{false};
  for (bool large : {false, true}) {
    if (large && !takes_large_tables()) break;
    run.large = large;
    const size_t entries = large ? kSegmentsPerLaunch : 1;
    const std::vector<CopySegment> segments(entries, segment);
    const std::vector<SgdTensor> sgds(entries, sgd);
    const std::vector<AdamTensor> adams(entries, adam);
    for (DType from : all) {
      kernels::copy_segments<Load>(segments, from, from, 1, run);
      kernels::fill(place, from, 1, 0, run);
      for (int64_t width : {1, 16}) {
        for (double scale : {1.0, 2.0}) {
          if (scale != 1 && !is_floating(from)) continue;
          kernels::gather_rows(place, place, &number, from, 1, width, scale, run);
        }
      }
      if (from == DType::uint8) continue;
      kernels::copy_segments<Load>(segments, from, from, 2, run);
      for (int64_t width : {1, 16}) {
        kernels::scatter_add(place, &row, place, from, 1, width, run);
      }
      kernels::update_sgd<Load>(sgds, from, {}, run);
      kernels::update_adam<Load>(adams, from, {}, run);
      for (DType to : all) {
        const bool converts = from != to && itemsize(from) <= 4 && itemsize(to) != 8;
        if (converts && to != DType::uint8) {
          kernels::copy_segments<Load>(segments, from, to, 1, run);
        }
      }
    }
  }
  kernels::partition_rows(RowPartition::of(1, 1, 0, 1), &row, nullptr, 1, &number,
                          {&row, &number, &number}, run);
  if (run.error == cudaSuccess) run.error = load_groups();
  if (run.error != cudaSuccess) cudaGetLastError();
  return run.error;
}

cudaError_t copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                          cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::copy_segments(segments, from, to, scale, run);
  return run.error();
}

cudaError_t fill(void* target, DType dtype, int64_t count, double value, cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::fill(target, dtype, count, value, run);
  return run.error();
}

cudaError_t scatter_add(void* target, const int64_t* rows, const void* values, DType dtype,
                        int64_t count, int64_t width, cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::scatter_add(target, rows, values, dtype, count, width, run);
  return run.error();
}

cudaError_t gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                        int64_t count, int64_t width, double scale, cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::gather_rows(target, source, positions, dtype, count, width, scale, run);
  return run.error();
}

cudaError_t partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                           int64_t most, int32_t* table, const RowGroups& groups,
                           cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::partition_rows(partition, ids, count, most, table, groups, run);
  return run.error();
}

cudaError_t update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options,
                       cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::update_sgd(tensors, dtype, options, run);
  return run.error();
}

cudaError_t update_adam(std::span<const AdamTensor> tensors, DType dtype,
                        const AdamOptions& options, cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::update_adam(tensors, dtype, options, run);
  return run.error();
}

}  // namespace usbyte::device
