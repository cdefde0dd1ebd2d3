#pragma once

#include "usbyte/policy.h"

namespace usbyte {

/// `automatic` where the network has dimensions: the best, under the simulator, of its plan for
/// all_reduces that go past them, of the same with routes, and of its plan for a network that costs
/// what routed ones do, with routes. The first where it is as good.
Plan automatic_routed(const Profile& profile, const NetworkModel& network,
                      const PolicyOptions& options);

}  // namespace usbyte
