// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "usbyte/plan.h"
#include "usbyte/sparse.h"
#include "usbyte/timeline.h"

namespace usbyte {

/// What the engine notes of one iteration, or the simulator predicts. Times are seconds, on the
/// steady clock or since the forward pass began; 0 = not yet.
struct StepRecord {
  using Interval = std::pair<double, double>;

  static constexpr int kEveryTensor = -1;  // a wait for all gradients of the step

  int64_t step = 0;
  std::vector<double> ready_s;                                 // by tensor
  std::vector<double> queued_s, launched_s, done_s;            // by op
  std::vector<std::pair<int, Interval>> waits;                 // by tensor, or kEveryTensor
  std::vector<std::pair<std::vector<int>, Interval>> updates;  // by tensors updated
  std::map<int, SparseTraffic> sparse;                         // by op that is sparse
  std::vector<std::pair<std::string, Interval>> passes = {};   // by name: "forward", "backward"
};

/// The events of the record's completed ops, its waits, updates and passes. The step begins with
/// the first pass.
Timeline events(const StepRecord& record, const Plan& plan);

}  // namespace usbyte
