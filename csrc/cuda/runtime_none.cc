// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda.h"
#include "cuda_device.h"
#include "usbyte/error.h"

namespace usbyte {

std::shared_ptr<Cuda> make_cuda(int) {
  throw UsageError("CUDA cannot be used: " + cuda_info().reason);
}

}  // namespace usbyte
