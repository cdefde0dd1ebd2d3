// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "usbyte/policy.h"

namespace usbyte {

/// Budget of one plan's local searches, in tensors and ops simulated: some 0.6 s.
inline constexpr int64_t kSearchWork = 3'000'000;

struct SearchEffort {
  int64_t work;  ///< tensors and ops that the local searches simulate; more for large jobs
  int drafts;    ///< drafts that are improved, of each number of ops in flight and kind of ops
};

/// `automatic` on a network without dimensions and for a job without codecs.
Plan automatic_searched(const Profile& profile, const NetworkModel& network,
                        const PolicyOptions& options, SearchEffort effort);

}  // namespace usbyte
