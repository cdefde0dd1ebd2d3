// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "usbyte/policy.h"

namespace usbyte {

/// `automatic` where `codec_of` says what gradients travel by: the best, under the simulator and
/// with what coding takes, of the plans of all policies that code what they are told to (so not of
/// bytecomp's), and of `automatic`'s for the job's bytes and for those that the codecs make of
/// them. DDP's plan where less than 1 % is to be won.
Plan automatic_coded(const Profile& profile, const NetworkModel& network,
                     const PolicyOptions& options);

}  // namespace usbyte
