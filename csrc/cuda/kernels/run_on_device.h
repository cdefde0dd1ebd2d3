// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "launch.h"

// Running kernels on the device, for the files that nvcc compiles.
namespace usbyte::device {
namespace {

template <typename Kernel>
__global__ void __launch_bounds__(kernels::kThreadsPerBlock<Kernel>)
    run_on_device(const __grid_constant__ Kernel kernel) {
  kernel({blockIdx.x, threadIdx.x, gridDim.x, blockDim.x});
}

/// Parameters of more than 4 KB came with CUDA 12.1; the driver may be older than this build.
constexpr bool kBuildTakesLargeTables = CUDART_VERSION >= 12010;

bool takes_large_tables() {
  static const bool driver_takes_them = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  return kBuildTakesLargeTables && driver_takes_them;
}

template <typename Kernel>
constexpr bool kBuilt = sizeof(Kernel) <= 4096 || kBuildTakesLargeTables;

class RunOnDevice {
 public:
  explicit RunOnDevice(cudaStream_t stream) : stream_(stream) {}

  static bool large_tables() { return takes_large_tables(); }

  template <typename Kernel>
  void operator()(const Kernel& kernel) {
    if constexpr (kBuilt<Kernel>) {
      static_assert(sizeof(Kernel) <= 32764);
      if (error_ != cudaSuccess) return;
      // Not <<<>>>, which copies the table once more.
      void* arguments[] = {const_cast<Kernel*>(&kernel)};
      error_ = cudaLaunchKernel(reinterpret_cast<const void*>(run_on_device<Kernel>),
                                dim3(kernels::blocks_for(kernel)),
                                dim3(kernels::kThreadsPerBlock<Kernel>), arguments, 0, stream_);
      if (error_ != cudaSuccess) cudaGetLastError();
    }
  }

  cudaError_t error() const { return error_; }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

/// Loads the kernels that it is given to run.
struct Load {
  bool large;
  cudaError_t error = cudaSuccess;

  bool large_tables() const { return large; }

  template <typename Kernel>
  void operator()(const Kernel&) {
    if constexpr (kBuilt<Kernel>) {
      cudaFuncAttributes ignored{};
      if (error == cudaSuccess) error = cudaFuncGetAttributes(&ignored, run_on_device<Kernel>);
    }
  }
};

}  // namespace
}  // namespace usbyte::device
