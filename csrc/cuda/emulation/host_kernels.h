// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cuda/kernel_arguments.h"

// The kernels of kernels.h on host memory, by the code that runs on the device, thread after
// thread: results are the device's bit for bit, but for the payload of NaNs. For EmulatedCuda and
// for checks. Arguments and errors are those of Cuda's methods of the same names; UsageError
// comes before anything is written.
namespace usbyte::host {

void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale);
void fill(void* target, DType dtype, int64_t count, double value);
void scatter_add(void* target, const int64_t* rows, const void* values, DType dtype, int64_t count,
                 int64_t width);
void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                 int64_t count, int64_t width, double scale);
void partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                    int64_t most, int32_t* table, const RowGroups& groups);
void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype);
void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                   int64_t stride);
void update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options);
void update_adam(std::span<const AdamTensor> tensors, DType dtype, const AdamOptions& options);

}  // namespace usbyte::host
