#pragma once

#include <cstdint>

#include "topology/themis.h"
#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// The fastest of `route_choices`, carried out as `simulate_schedule` does, for an all_reduce of so
/// many bytes in 1, 2, 4, ... 64 chunks; of those within 3 % of it the one with the fewest, as each
/// phase costs more than models know, and the fixed order unless another is 5 % faster. No chunk's
/// shards are below a page.
MeshChoice best_route(const Topology& topology, int64_t bytes);

/// The fastest with the fixed order: a hierarchical all_reduce.
MeshChoice fixed_route(const Topology& topology, int64_t bytes);

/// The same plan where all_reduces go through the network's dimensions, if that is predicted to
/// take less time than not to. Ops with codecs stay as they are. Without dimensions, or one only,
/// nothing changes.
Plan with_routes(const Plan& plan, const NetworkModel& network);

/// What a network costs whose all_reduces are all routed: a cost fitted to what `best_route` is
/// predicted to take. For policies, which then plan as for any network. The topology is none.
NetworkModel routed_network(const NetworkModel& network);

}  // namespace usbyte
