// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/dimension_path.h"
#include "topology/themis.h"
#include "usbyte/codec_costs.h"
#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/profile.h"

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

/// Dimension paths of an op; none without `has_dimension_paths`, or unless there are two
/// dimensions of more than one rank. With sums in either dimension, the slower one first: the op's
/// codec for sums alone, and, where the codec can, in both. `topk` has AdaTopK's ratios there:
/// messages take about as long in both dimensions, and the slower one has the op's own ratio;
/// others have the same codec. What was picked is gathered as what differs from zero, all of it,
/// where that is few in every block; casts are gathered as casts.
///
/// These are the hierarchical paths of ByteComp's decision tree with divisible first and last
/// steps (Wang, Lin, Zhu and Ng, "Hi-Speed DNN Training with Espresso", EuroSys 2023).
std::vector<DimensionPath> dimension_paths(const Op& op, const Topology& mesh);

/// Specs of all codecs that ops with this one may have on their paths, ascending, "none" apart.
std::vector<std::string> dimension_codecs(const std::string& codec, const Topology& mesh);

/// The plan where each op goes flat, as it is, or the dimension path with which the step is
/// predicted to be the shortest; the same plan if it hides everything. All ops go alike first, each
/// path in turn, then op by op, the largest first, until nothing changes or half a million ops have
/// been simulated. For a second step in which something is lost, 2 % of the iteration must be won.
/// Never predicted to be slower than the plan. Throws UsageError where costs of a codec are
/// missing.
Plan with_dimension_paths(const Plan& plan, const Profile& profile, const NetworkModel& network,
                          Overlap overlap, const CodecCosts& costs);

}  // namespace usbyte
