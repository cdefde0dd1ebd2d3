// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/policy.h"
#include "usbyte/profile.h"

namespace usbyte {

/// A slice of one tensor and when its gradient is ready.
struct ReadyBlock {
  Block block;
  int64_t bytes;
  double ready_s;
};

/// The all_reduces of `parts`, one each, in the order in which a priority queue sends them over
/// `network`: of the ready parts the first in `parts` goes next, as soon as `window_bytes` and
/// `fence` admit it.
std::vector<Op> priority_trace(const std::vector<ReadyBlock>& parts, const NetworkModel& network,
                               int64_t window_bytes, bool fence);

/// How many parts `p3` and `bytescheduler` make of a job. More than a million, which they refuse,
/// are far more than any network takes in a step.
int64_t p3_parts(const Profile& profile, const PolicyOptions& options);
int64_t bytescheduler_parts(const Profile& profile, const PolicyOptions& options);

}  // namespace usbyte
