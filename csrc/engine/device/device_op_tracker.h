// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "device_step.h"

namespace usbyte {

/// Watches ops that are complete for the host until the device is through with them. Not
/// thread-safe.
class DeviceOpTracker {
 public:
  void add(LaunchedOp op) { ops_.push_back(std::move(op)); }
  bool empty() const { return ops_.empty(); }
  const LaunchedOp* oldest() const { return ops_.empty() ? nullptr : &ops_.front(); }

  struct Waiting {
    int op;
    int64_t step;
    double since_s;  // that it is seen to run, or that another one was seen to end
  };
  /// Puts aside what is over. Returns the oldest op left if it has started: one that has not waits
  /// for gradients, not for the network.
  std::optional<Waiting> look(DeviceClock& clock, double now_s);
  /// What has been put aside since the last call.
  std::vector<LaunchedOp> take_passed() { return std::exchange(passed_, {}); }

 private:
  std::deque<LaunchedOp> ops_;  // in launch order
  std::vector<LaunchedOp> passed_;
  double since_s_ = 0;  // 0: the oldest was not seen to run yet
};

}  // namespace usbyte
