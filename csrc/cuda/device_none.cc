// SPDX-License-Identifier: Apache-2.0
#include "cuda_device.h"

namespace usbyte {

CudaInfo cuda_info() {
  CudaInfo info{};
  info.reason =
      "this build has no CUDA part: reinstall usbyte with nvcc on PATH and USBYTE_CUDA=ON";
  return info;
}

}  // namespace usbyte
