// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "usbyte/communicator.h"

// Collectives among ranks that share an address space: what LocalCommunicator's ranks do once they
// have met. Index r of a vector is rank r.
namespace usbyte {

/// Elements that `request` communicates, in bytes.
int64_t payload_bytes(const Request& request);

/// The first thing in which `a` differs from `b`, as "dtype int32 against float32"; empty if the
/// two belong to one collective.
std::string difference(const Request& a, const Request& b);

/// What keeps a request from being carried out among `size` ranks; empty if nothing does.
std::string problem(const Request& request, int size);

/// Moves and reduces the data. The requests do not differ and have no problem. Reduces in rank
/// order: the result depends on nothing else. Integers wrap around, as in torch; min and max
/// propagate NaN, so that a rank that diverged is seen by all.
void execute(const std::vector<const Request*>& requests);

}  // namespace usbyte
