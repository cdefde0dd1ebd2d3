// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "usbyte/communicator.h"
#include "usbyte/network.h"

namespace usbyte {

/// N ranks as threads of one process, for tests, sanitizers and benchmarks.
///
/// Reductions run in rank order, so results do not depend on arrival order. With a non-zero `cost`,
/// an op of m bytes completes no earlier than max(channel free, posted + latency) + beta * m and
/// posted + alpha: startups overlap, transfers take turns. Requests that differ between ranks
/// complete with a MismatchError on every rank. Reduces floats of all widths, int32 and int64;
/// other types raise UsageError through the completion.
///
/// Returns one communicator for each rank; they share a hub with one thread, which ends with the
/// last of them.
std::vector<std::unique_ptr<Communicator>> make_local_communicators(int size, AlphaBeta cost = {});

}  // namespace usbyte
