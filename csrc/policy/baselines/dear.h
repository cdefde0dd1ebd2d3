// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "usbyte/policy.h"

namespace usbyte {

/// Tensors that DeAR scatters and gathers together: neighbours in the flat buffer, of one dtype.
struct FusedGroup {
  Block block;
  int64_t bytes;
  double ready_s;  ///< when the last of its gradients is ready
  double need_s;   ///< when the first of its parameters is needed
};

/// Groups of at most `fusion_bytes`, cut from the end of the flat buffer; a larger tensor is a
/// group of its own.
std::vector<FusedGroup> fused_groups(const Profile& profile, int64_t fusion_bytes);

/// Each group's reduce_scatter as it fills, then the all_gathers in the order of need; one op at a
/// time, as DeAR has one communication stream.
Plan dear_plan(std::string policy, const Profile& profile, std::vector<FusedGroup> groups);

}  // namespace usbyte
