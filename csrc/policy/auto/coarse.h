// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "usbyte/profile.h"

namespace usbyte {

/// The same job in fewer tensors, of which searches have less to try: neighbours in the flat
/// buffer, of one dtype, become one where together they hold no more than 1/`parts` of all bytes,
/// and neither their gradients nor their first uses are further apart than 1/`parts` of the
/// iteration. It is ready with the last of its gradients and needed with the first of its
/// parameters, so that a plan that cuts none of these tensors is no later for the job itself than
/// for this one, but for updates in the forward pass. One that cuts some can be: ops whose
/// gradients are there sooner share the channel for longer with the ops before them. Elements stay
/// where they are: the blocks of a plan for one are blocks for the other. Spreads are left out.
Profile coarse(const Profile& profile, int64_t parts);

}  // namespace usbyte
