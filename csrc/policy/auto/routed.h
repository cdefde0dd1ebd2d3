// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "usbyte/policy.h"

namespace usbyte {

/// `automatic` where the network has dimensions: the best of its plan for all_reduces that go past
/// them, of the same with routes, of its plan for a network that costs what routed ones do, with
/// routes, and of themis' with buckets of the given size and of any of `tuned_sizes`.
Plan automatic_routed(const Profile& profile, const NetworkModel& network,
                      const PolicyOptions& options);

}  // namespace usbyte
