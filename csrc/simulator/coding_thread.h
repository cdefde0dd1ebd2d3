// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <set>
#include <span>
#include <vector>

#include "usbyte/codec_costs.h"
#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// The engine's one coding thread as predicted: of the tasks that wait it takes the first op's, its
/// encoding before its decoding, and does one after the other. Not thread-safe.
///
/// Time is seconds and never goes back. What is put at a moment waits before the thread takes a
/// task at that moment.
class CodingThread {
 public:
  struct Times {
    double encode_s = 0, decode_s = 0;
  };
  /// What it takes for an op of the plan that has a codec, adding up by a scheme included.
  static Times times_of(const Plan& plan, const Op& op, const CodecCosts& costs, int ranks);

  struct Task {
    int op;
    bool decodes;
    auto operator<=>(const Task&) const = default;
  };

  /// Throws UsageError where the costs of a codec of the plan are not known.
  CodingThread(const Plan& plan, const CodecCosts& costs, const NetworkModel& network);

  void put(const Task& task, double now_s);
  /// When the thread next takes or ends a task; infinity where there is none.
  double next_s() const { return next_s_; }
  /// Goes on to `next_s`; true if a task ends there, which is `ended` then.
  bool advance();
  const Task& ended() const { return running_; }

 private:
  std::vector<Times> times_;  // by op
  std::set<Task> waiting_;
  Task running_{};
  bool busy_ = false;
  double next_s_ = std::numeric_limits<double>::infinity();
};

}  // namespace usbyte
