// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "device/device_step.h"
#include "usbyte/step_record.h"
#include "usbyte/timeline.h"

namespace usbyte {

/// Records of steps on their way to the files of timelines, which the engine's thread writes. Those
/// of a device become records of times once the device is through with their step. Not thread-safe.
class TimelineOutbox {
 public:
  using Writers = std::vector<std::shared_ptr<TimelineWriter>>;

  const Writers& writers() const { return writers_; }
  void set_writers(Writers writers) { writers_ = std::move(writers); }
  /// Whether a timeline is recorded.
  bool records() const { return !writers_.empty(); }

  /// A step begins, whose record is to be posted once.
  void begin_step() { posted_ = false; }
  bool posted() const { return posted_; }
  /// Whether the record of `step` was not posted and belongs into a timeline.
  bool wants(int64_t step) const {
    const auto has = [step](const auto& writer) { return writer->steps().contains(step); };
    return !posted_ && std::ranges::any_of(writers_, has);
  }
  void post(StepRecord record) { records_.push_back(std::move(record)); }
  void post(DeviceRecord record) { device_records_.push_back(std::move(record)); }
  /// The step's record was posted, or is not wanted.
  void set_posted() { posted_ = true; }

  bool has_records() const { return !records_.empty(); }
  bool has_device_records() const { return !device_records_.empty(); }
  /// Records have been taken and are not back, or written, yet.
  bool busy() const { return busy_; }

  /// Takes all records, to be written; `end_write` follows. The timelines of `failed` writers end.
  std::vector<StepRecord> begin_write() {
    busy_ = true;
    return std::exchange(records_, {});
  }
  void end_write(const Writers& failed) {
    const auto has_failed = [&](const auto& w) { return std::ranges::count(failed, w) > 0; };
    std::erase_if(writers_, has_failed);
    busy_ = false;
  }

  /// Takes all records of the device, the oldest first; `end_resolve` follows, with the times of
  /// the first ones and with the rest.
  std::deque<DeviceRecord> begin_resolve() {
    busy_ = true;
    return std::exchange(device_records_, {});
  }
  void end_resolve(std::vector<StepRecord> resolved, const std::deque<DeviceRecord>& rest) {
    for (StepRecord& record : resolved) records_.push_back(std::move(record));
    device_records_.insert(device_records_.begin(), rest.begin(), rest.end());
    busy_ = false;
  }

 private:
  Writers writers_;
  std::vector<StepRecord> records_;
  std::deque<DeviceRecord> device_records_;
  bool posted_ = true;
  bool busy_ = false;
};

}  // namespace usbyte
