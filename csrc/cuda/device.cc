// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "cuda_device.h"

namespace usbyte {
namespace {

/// CUDA encodes 13.2 as 13020; 0 means that there is none.
std::string version_text(int version) {
  if (version == 0) return "";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Clears the error too: otherwise the next, unrelated CUDA call that checks would report it.
std::string reason_text(cudaError_t error, bool has_driver) {
  cudaGetLastError();
  if (error == cudaErrorInsufficientDriver && !has_driver) {
    return "no NVIDIA driver: install one, or in a container pass the GPUs through";
  }
  std::string reason = std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorInsufficientDriver) reason += "; update the NVIDIA driver";
  if (error == cudaErrorNoDevice) reason += "; check nvidia-smi and CUDA_VISIBLE_DEVICES";
  return reason;
}

}  // namespace

CudaInfo cuda_info() {
  CudaInfo info{};
  info.built = true;
  int runtime = 0, driver = 0, count = 0;
  if (cudaRuntimeGetVersion(&runtime) == cudaSuccess) info.runtime_version = version_text(runtime);
  if (cudaDriverGetVersion(&driver) == cudaSuccess) info.driver_version = version_text(driver);
  cudaError_t error = cudaGetDeviceCount(&count);
  for (int device = 0; error == cudaSuccess && device < count; ++device) {
    cudaDeviceProp found{};
    error = cudaGetDeviceProperties(&found, device);
    if (error != cudaSuccess) break;
    info.devices.push_back({found.name,
                            std::to_string(found.major) + "." + std::to_string(found.minor),
                            static_cast<int64_t>(found.totalGlobalMem)});
  }
  if (error != cudaSuccess) {
    info.devices.clear();
    info.reason = reason_text(error, driver != 0);
  } else if (count == 0) {
    info.reason = "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES";
  }
  return info;
}

}  // namespace usbyte
