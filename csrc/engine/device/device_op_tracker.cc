// SPDX-License-Identifier: Apache-2.0
#include "device_op_tracker.h"

namespace usbyte {

std::optional<DeviceOpTracker::Waiting> DeviceOpTracker::look(DeviceClock& clock, double now_s) {
  while (!ops_.empty() && clock.passed(ops_.front().done)) {
    passed_.push_back(std::move(ops_.front()));
    ops_.pop_front();
    since_s_ = 0;
  }
  if (ops_.empty() || !clock.passed(ops_.front().started)) return std::nullopt;
  if (since_s_ == 0) since_s_ = now_s;
  return Waiting{ops_.front().op, ops_.front().step, since_s_};
}

}  // namespace usbyte
