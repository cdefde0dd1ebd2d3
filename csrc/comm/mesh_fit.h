// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "usbyte/communicator.h"
#include "usbyte/topology.h"

namespace usbyte {

/// Throws UsageError unless these are communicators of one rank of the mesh, one for each axis
/// group that has others, and all of them `stream_ordered`, or none.
void check_mesh(const Topology& topology, const std::shared_ptr<Communicator>& flat,
                const std::vector<std::shared_ptr<Communicator>>& axis_groups, bool on_streams);

/// For messages.
std::string phase_failure(const ChunkPhase& at, const Dimension& dimension, const std::string& why);

}  // namespace usbyte
