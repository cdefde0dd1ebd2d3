// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include "kernels.h"
#include "run_on_device.h"

// Apart from the others, so that both are compiled at once.
namespace usbyte::device {

cudaError_t load_groups() {
  alignas(16) static std::byte place[16];
  const GroupEncoding encoding{place, nullptr, place, 1, 0};
  const GroupEncoding keeping{place, reinterpret_cast<float*>(place), place, 1, 0};
  const GroupDecoding decoding{place, place, 1};
  Load run{false};
  using Kind = GroupCodec::Kind;
  for (Kind kind :
       {Kind::fp16, Kind::bf16, Kind::int8, Kind::e4m3, Kind::e5m2, Kind::qsgd2, Kind::qsgd4,
        Kind::qsgd8, Kind::terngrad, Kind::majority, Kind::efsignsgd, Kind::onebit}) {
    for (DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      kernels::encode_groups({kind}, {&encoding, 1}, dtype, run);
      kernels::encode_groups({kind}, {&keeping, 1}, dtype, run);
      kernels::decode_groups({kind}, {&decoding, 1}, dtype, 1, 0, run);
    }
  }
  return run.error;
}

cudaError_t encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype,
                          cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::encode_groups(codec, runs, dtype, run);
  return run.error();
}

cudaError_t decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype,
                          int ranks, int64_t stride, cudaStream_t stream) {
  RunOnDevice run(stream);
  kernels::decode_groups(codec, runs, dtype, ranks, stride, run);
  return run.error();
}

}  // namespace usbyte::device
