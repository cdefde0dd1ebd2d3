// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "policy/support/units.h"

namespace usbyte {

/// One op of US-Byte.
struct Send {
  TensorSlice slice;
  double start_s, end_s;
};

/// US-Byte's ops of one iteration, one at a time.
struct UsByteSchedule {
  std::vector<Send> sends;
  std::vector<int64_t> rest;  ///< by tensor: bytes that no op carries yet
  double channel_s = 0;       ///< when the last op has ended
  double delay_s = 0;         ///< how far the ops so far prolong the iteration
};

/// Phase 1, during backward: `order` holds every tensor, the highest priority first. Of the ready
/// tensors the first one is sent until the next gradient appears.
UsByteSchedule us_byte_phase1(const UnitJob& job, std::span<const int> order);

/// Phase 2, after backward: one op with all that is left of each tensor, in forward order. It is
/// Jackson's rule ("Scheduling a production line to minimize maximum tardiness", 1955): no other
/// order of these ops has a smaller delay.
void us_byte_phase2(const UnitJob& job, UsByteSchedule& schedule);

/// Priorities of phase 1, by local search from the forward order on: a tensor keeps the channel
/// from those whose gradients appear while it could be sent whole, if that shortens the iteration.
/// Evaluates at most as many orders as there are tensors.
std::vector<int> us_byte_priorities(const UnitJob& job);

}  // namespace usbyte
