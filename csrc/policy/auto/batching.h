// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

namespace usbyte {

/// Jobs in due date order, cut into batches that run one after the other.
struct Batching {
  double lateness_s;        ///< the largest completion minus due date
  std::vector<int> begins;  ///< first job of each batch, ascending
};

/// Serial batching to minimise the largest lateness (1|s-batch|Lmax): a batch takes `startup_s`
/// plus the lengths of its jobs, at least `least_s`, and its jobs complete with it. All jobs are
/// available at time 0; `due_s` ascends and may be negative. The best of all cuts in this order; no
/// other order is better unless a batch is shorter than `least_s`. The dynamic programme of Webster
/// and Baker, "Scheduling Groups of Jobs on a Single Machine", Operations Research 1995, whose
/// steps are binary searches here: O(n log n), memory too. Of cuts that are as good but for
/// rounding the one with the longest first batches.
Batching batch_exactly(std::span<const double> length_s, std::span<const double> due_s,
                       double startup_s, double least_s = 0);

}  // namespace usbyte
