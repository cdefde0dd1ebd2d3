// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "usbyte/policy.h"

namespace usbyte {

/// `automatic` where `codec_of` says what gradients travel by: the best, under the simulator and
/// with what coding takes, of the plans of all policies, of `automatic`'s for the job's bytes, with
/// the codecs and without, and of that for the bytes that the codecs make of them.
Plan automatic_coded(const Profile& profile, const NetworkModel& network,
                     const PolicyOptions& options);

}  // namespace usbyte
