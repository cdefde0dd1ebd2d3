// SPDX-License-Identifier: Apache-2.0
#include "policy/transforms/routing.h"
#include "usbyte/policy.h"

namespace usbyte {

Plan themis(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  const Plan routed = with_routes(ddp(profile, network, options), network);
  return routed.with_ops("themis", routed.ops());
}

}  // namespace usbyte
