// SPDX-License-Identifier: Apache-2.0
#include "flight_recorder.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace usbyte {
namespace {

constexpr size_t kKept = 16;  // several times what is in flight under the largest windows in use

}  // namespace

void FlightRecorder::launched(int64_t step, int op, double now_s) {
  if (flights_.size() == kKept) flights_.pop_front();
  flights_.push_back({step, op, now_s, 0});
}

void FlightRecorder::done(int64_t step, int op, double now_s) {
  const auto found = std::find_if(flights_.rbegin(), flights_.rend(), [&](const Flight& flight) {
    return flight.step == step && flight.op == op;
  });
  if (found != flights_.rend()) found->done_s = now_s;
}

nlohmann::ordered_json FlightRecorder::to_json(const Plan& plan, double now_s) const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Flight& flight : flights_) {
    rows.push_back({{"step", flight.step},
                    {"op", plan.describe(flight.op)},
                    {"launched_s", now_s - flight.launched_s},
                    {"took_s", nullptr}});
    if (flight.done_s > 0) rows.back()["took_s"] = flight.done_s - flight.launched_s;
  }
  return rows;
}

}  // namespace usbyte
