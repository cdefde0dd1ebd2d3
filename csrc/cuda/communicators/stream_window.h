// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace usbyte {

/// Where a launch goes, and what has to be over before it begins.
struct StreamPlacement {
  int slot = 0;
  /// Slots, other than its own, whose last launches have to be over first. What it shall not run
  /// beside and is not named here is over once every launch before it has begun.
  std::vector<int> after;
};

/// The credit window of ops that are launched ahead of time, onto slots: streams that each run one
/// op after the other. On a stream nobody can ask what is in flight, so ops are taken to complete
/// in the order in which they were launched, and one that needs credit waits for the oldest. That
/// makes placement a function of the launches alone, the same on every rank. Not thread-safe.
class StreamWindow {
 public:
  /// At most `slots` ops, one at least, run side by side.
  explicit StreamWindow(int slots) : slots_(slots) {}

  /// Places the next launch: at most `window_bytes` in flight with it (0: any number; more than its
  /// window goes alone), and, with `fence`, nothing.
  StreamPlacement place(int64_t bytes, int64_t window_bytes, bool fence);

 private:
  struct Flight {
    int slot;
    int64_t bytes;
  };

  int free_slot() const;

  int slots_;
  std::deque<Flight> flights_;  // may be in flight, oldest first, each on a slot of its own
  int64_t bytes_ = 0;           // of them together
};

}  // namespace usbyte
