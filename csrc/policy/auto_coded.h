#pragma once

#include "usbyte/policy.h"

namespace usbyte {

/// `automatic` where `codec_of` says what gradients travel by: the best, under the simulator and
/// with what coding takes, of the plans of all policies that code what they are told to, and of
/// `automatic`'s for the job's bytes and for those that the codecs make of them.
Plan automatic_coded(const Profile& profile, const NetworkModel& network,
                     const PolicyOptions& options);

}  // namespace usbyte
