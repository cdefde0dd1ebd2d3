// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/cuda.h"
#include "usbyte/codec_costs.h"
#include "usbyte/network.h"

namespace usbyte {

/// A cost of the form max(alpha, beta m), constant and then by the byte, by measurements of several
/// sizes; overlap_s is alpha_s. Of all such costs, the one whose mean relative error is least over
/// the sizes' medians. Throws UsageError on no samples, or one of no bytes or no time.
Fit fit_codec_cost(std::span<const Sample> samples);

/// What a codec was measured to cost one thread, or a device.
struct MeasuredCodec {
  std::string spec;  ///< in its canonical spelling
  CodecCost cost;
  double encode_residual, decode_residual;  ///< as `Fit::residual`
  int64_t largest_bytes;                    ///< of the gradients, float32, in the largest sample
  int64_t message_bytes;                    ///< of their message
  std::vector<Sample> encode, decode;       ///< bytes of gradients; s for one message
};

/// Measures a codec by the engine's own coded ops: encoding with its state of what was not sent,
/// decoding as ranks' messages are combined. Gradients are normal and come from main memory or the
/// last cache, as after a backward pass; sizes go from 256 bytes to 4 MiB by factors of 4.
///
/// Without a device, on this thread. With one, of gradients there, as long as its streams take, the
/// host's share of the work included, for which they wait; kernels are measured up to 64 MiB, or as
/// far as there is room. It takes about `budget_s` and the time to make room; it ends with the
/// first sizes where that is too little. Throws UsageError on "none", an unknown spec or a budget
/// that is not positive, and FaultError where the device fails.
MeasuredCodec measure_codec(std::string_view spec, double budget_s,
                            const std::shared_ptr<Cuda>& device = nullptr);

}  // namespace usbyte
