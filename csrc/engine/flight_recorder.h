// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <nlohmann/json_fwd.hpp>

#include "usbyte/plan.h"

namespace usbyte {

/// The last ops that an engine has launched, for whoever looks for the cause of a fault. Not
/// thread-safe.
class FlightRecorder {
 public:
  void launched(int64_t step, int op, double now_s);
  void done(int64_t step, int op, double now_s);
  /// The oldest first: step, op as `Plan::describe` has it, launched_s before `now_s`, and took_s,
  /// null while it is in flight.
  nlohmann::ordered_json to_json(const Plan& plan, double now_s) const;

 private:
  struct Flight {
    int64_t step;
    int op;
    double launched_s, done_s;  // on the steady clock; 0 = not yet
  };
  std::deque<Flight> flights_;  // in launch order
};

}  // namespace usbyte
