// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "cuda/kernel_arguments.h"

// Launches the kernels on the calling thread's current device, to which `stream` belongs. Arguments
// are those of Cuda's methods of the same names; nothing is launched for zero elements. They return
// what the launch returned, without leaving it behind as the thread's last error; an error of the
// kernel itself shows later, as with any launch. UsageError comes before anything is launched.
namespace usbyte::device {

/// Loads all kernels onto the current device, which takes a while. CUDA would load each at its
/// first launch, where it may wait for all that runs on the device: also for a collective that
/// waits for what this rank has yet to launch.
cudaError_t load();
/// Of those, the ones for codecs.
cudaError_t load_groups();

cudaError_t copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                          cudaStream_t stream);
cudaError_t fill(void* target, DType dtype, int64_t count, double value, cudaStream_t stream);
cudaError_t scatter_add(void* target, const int64_t* rows, const void* values, DType dtype,
                        int64_t count, int64_t width, cudaStream_t stream);
cudaError_t gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                        int64_t count, int64_t width, double scale, cudaStream_t stream);
cudaError_t partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                           int64_t most, int32_t* table, const RowGroups& groups,
                           cudaStream_t stream);
cudaError_t encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype,
                          cudaStream_t stream);
cudaError_t decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype,
                          int ranks, int64_t stride, cudaStream_t stream);
cudaError_t update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options,
                       cudaStream_t stream);
cudaError_t update_adam(std::span<const AdamTensor> tensors, DType dtype,
                        const AdamOptions& options, cudaStream_t stream);

}  // namespace usbyte::device
