// SPDX-License-Identifier: Apache-2.0
#include "routed.h"

#include <vector>

#include "policy/transforms/routing.h"
#include "rivals.h"
#include "usbyte/simulator.h"

namespace usbyte {

Plan automatic_routed(const Profile& profile, const NetworkModel& network,
                      const PolicyOptions& options) {
  NetworkModel flat = network;
  flat.topology.reset();
  Plan best = automatic(profile, flat, options);
  if (options.sharded) return best;  // its scatters and gathers have no routes
  Simulator simulator(profile, network, options.overlap, false, options.codec_costs);
  double best_s = simulator.step_s(best);
  std::vector<Plan> routed = {
      with_routes(best, network),
      with_routes(automatic(profile, routed_network(network), options), network)};
  PolicyOptions sized = options;
  routed.push_back(make_plan("themis", profile, network, sized));
  for (const int64_t size : tuned_sizes()) {
    sized.bucket_bytes = size;
    routed.push_back(make_plan("themis", profile, network, sized));
  }
  for (Plan& plan : routed) {
    const double step_s = simulator.step_s(plan);
    if (step_s >= best_s) continue;
    best = plan.with_ops("auto", plan.ops());
    best_s = step_s;
  }
  return best;
}

}  // namespace usbyte
