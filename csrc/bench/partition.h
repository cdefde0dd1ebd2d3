// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "bench.h"
#include "cuda/cuda.h"

namespace usbyte::bench {

struct PartitionWork {
  int64_t batch = 0;    // rows
  int64_t batches = 0;  // for the first line of the table; the others have a tenth
};

/// Partitions batches of rows on the device, and checks every one. Returns the exit code.
int bench_partition(const Options& options, Cuda& cuda, const PartitionWork& work);

}  // namespace usbyte::bench
