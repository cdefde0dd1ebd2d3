#pragma once

#include <cstdint>

#include "usbyte/plan.h"

namespace usbyte {

/// The credit window: decides whether the next op may start beside those in flight. Engine and
/// simulator share it, so that a prediction means this plan under these rules. Not thread-safe; the
/// owner guards it.
class Admission {
 public:
  /// True if `op` of `bytes` may start now. An op larger than its window is admitted when nothing
  /// is in flight: no op starves and credit never goes negative.
  bool admits(const Op& op, int64_t bytes) const {
    if (ops_ == 0) return true;
    return !op.fence && bytes_ + bytes <= op.window_bytes;
  }
  void launched(int64_t bytes) {
    ++ops_;
    bytes_ += bytes;
  }
  void completed(int64_t bytes) {
    --ops_;
    bytes_ -= bytes;
  }
  int ops_in_flight() const { return ops_; }

 private:
  int ops_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace usbyte
