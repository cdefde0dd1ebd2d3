#pragma once

#include <cstdint>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// A slice of one tensor and when its gradient is ready.
struct Part {
  Block block;
  int64_t bytes;
  double ready_s;
};

/// The all_reduces of `parts`, one each, in the order in which a priority queue sends them over
/// `network`: of the ready parts the first in `parts` goes next, as soon as `window_bytes` and
/// `fence` admit it.
std::vector<Op> priority_trace(const std::vector<Part>& parts, const NetworkModel& network,
                               int64_t window_bytes, bool fence);

}  // namespace usbyte
