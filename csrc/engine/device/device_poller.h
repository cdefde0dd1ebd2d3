// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device_op_tracker.h"
#include "usbyte/communicator.h"

namespace usbyte {

/// Ops that were put on the device's streams since it was polled last. Not thread-safe.
class DeviceOps {
 public:
  void add(LaunchedOp op) {
    if (open_step_ == 0) open_step_ = op.step;
    ops_.push_back(std::move(op));
  }
  bool empty() const { return ops_.empty(); }
  std::vector<LaunchedOp> take() { return std::exchange(ops_, {}); }

  /// The step of the oldest op that the device was not seen to be through with, or 0.
  int64_t open_step() const { return open_step_; }
  /// `oldest` is the oldest op that the poller still watches; null if there is none.
  void update_open_step(const LaunchedOp* oldest) {
    if (!oldest && !ops_.empty()) oldest = &ops_.front();
    open_step_ = oldest ? oldest->step : 0;
  }

  /// The device is, or was, polled for the last time: from then on ops may end by an abort.
  bool final_poll_done() const { return final_poll_done_; }
  /// Returns whether it was before.
  bool set_final_poll_done() { return std::exchange(final_poll_done_, true); }

 private:
  std::vector<LaunchedOp> ops_;
  int64_t open_step_ = 0;
  bool final_poll_done_ = false;
};

/// Looks at the device now and then, as nothing tells the host what has ended there. Only the
/// engine's thread uses it, and needs no lock for that.
class DevicePoller {
 public:
  struct Findings {
    std::optional<DeviceOpTracker::Waiting> waiting;  ///< the op that the device is at
    std::vector<StepRecord> resolved;  ///< of records that the device is through with
    std::string problem;               ///< not empty: it has failed
  };

  /// When the device was polled last, s.
  double polled_s() const { return polled_s_; }
  void begin(std::vector<LaunchedOp> launched, double now_s) {
    polled_s_ = now_s;
    for (LaunchedOp& op : launched) watch_.add(std::move(op));
  }
  /// Calls the device and may wait for it. Takes the records that it is through with from
  /// `records`. In the `last` poll it waits for nothing that an abort may have to end.
  Findings look(DeviceClock& clock, Communicator& communicator, std::deque<DeviceRecord>& records,
                bool last);
  /// Ops that have ended since the last call.
  std::vector<LaunchedOp> take_passed() { return watch_.take_passed(); }
  /// The oldest op that has not ended; null if there is none.
  const LaunchedOp* oldest() const { return watch_.oldest(); }

 private:
  DeviceOpTracker watch_;
  double polled_s_ = 0;
};

}  // namespace usbyte
