#include "auto_routed.h"

#include <utility>

#include "usbyte/routes.h"
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
  for (const NetworkModel& assumed : {flat, routed_network(network)}) {
    Plan plan = with_routes(automatic(profile, assumed, options), network);
    const double step_s = simulator.step_s(plan);
    if (step_s >= best_s) continue;
    best = std::move(plan);
    best_s = step_s;
  }
  return best;
}

}  // namespace usbyte
