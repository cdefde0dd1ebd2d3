// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cuda/kernel_arguments.h"

// What the kernels rely on, checked before a launch: on the device a misaligned address or a
// negative count is an error after which the process has no CUDA any more. All throw UsageError.
namespace usbyte {

void check_copy(std::span<const CopySegment> segments, DType from, DType to, double scale);
/// Returns the element to write, in the lowest bytes.
uint64_t check_fill(const void* target, DType dtype, int64_t count, double value);
void check_scatter_add(const void* target, const int64_t* rows, const void* values, DType dtype,
                       int64_t count, int64_t width);
void check_gather_rows(const void* target, const void* source, const int32_t* positions,
                       DType dtype, int64_t count, int64_t width, double scale);
void check_partition(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                     int64_t most, const int32_t* table, const RowGroups& groups);
void check_encode(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype);
void check_decode(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                  int64_t stride);
void check_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options);
void check_adam(std::span<const AdamTensor> tensors, DType dtype);

}  // namespace usbyte
