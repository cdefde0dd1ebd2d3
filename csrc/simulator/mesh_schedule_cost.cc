// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "mesh_simulator.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// A phase in hand.
struct Flight {
  size_t chunk;
  double startup_s, transfer_s;  // what is left of them
};

// Dimensions that carry out their orders; all have come as far as `go_on` says.
class Playing {
 public:
  Playing(const Topology& topology, const MeshSchedule& schedule, double bytes, int in_flight)
      : schedule_(schedule), in_flight_(static_cast<size_t>(in_flight)) {
    for (const Route& route : schedule.routes) {
      phases_.push_back(mesh_phases(topology, schedule.kind, route,
                                    bytes / static_cast<double>(schedule.routes.size())));
    }
    passed_.resize(phases_.size());
    taken_.resize(schedule.order.size());
    in_hand_.resize(schedule.order.size());
  }

  /// In the order in which they were taken up.
  const std::vector<LinePhase>& launched() const { return launched_; }

  double run() {
    double now_s = 0;
    for (;;) {
      take();
      const double step_s = next_s();
      if (step_s == kNever) break;  // all is over, as nothing waits in a circle
      now_s += step_s;
      go_on(step_s);
    }
    return now_s;
  }

 private:
  void take() {
    for (size_t d = 0; d < taken_.size(); ++d) {
      const std::vector<ChunkPhase>& order = schedule_.order[d];
      for (; taken_[d] < order.size() && in_hand_[d].size() < in_flight_; ++taken_[d]) {
        const auto chunk = static_cast<size_t>(order[taken_[d]].chunk);
        if (passed_[chunk] != order[taken_[d]].phase) break;
        const MeshPhase& phase = phases_[chunk][static_cast<size_t>(passed_[chunk])];
        in_hand_[d].push_back({chunk, phase.startup_s, phase.transfer_s});
        launched_.push_back({static_cast<int>(d), order[taken_[d]]});
      }
    }
  }

  static double sending(const std::vector<Flight>& flights) {
    return static_cast<double>(
        std::ranges::count_if(flights, [](const Flight& f) { return f.startup_s <= 0; }));
  }

  double next_s() const {
    double least = kNever;
    for (const std::vector<Flight>& flights : in_hand_) {
      for (const Flight& f : flights) {
        least = std::min(least, f.startup_s > 0 ? f.startup_s : f.transfer_s * sending(flights));
      }
    }
    return least;
  }

  void go_on(double step_s) {
    for (std::vector<Flight>& flights : in_hand_) {
      const double share_s = step_s / std::max(sending(flights), 1.0);
      for (Flight& f : flights) {
        double& left_s = f.startup_s > 0 ? f.startup_s : f.transfer_s;
        const double spent_s = f.startup_s > 0 ? step_s : share_s;
        // Rounding must not leave a rest that time is too coarse for.
        left_s = left_s <= spent_s * (1 + 1e-12) ? 0 : left_s - spent_s;
      }
      std::erase_if(flights, [&](const Flight& f) {
        if (f.startup_s > 0 || f.transfer_s > 0) return false;
        ++passed_[f.chunk];
        return true;
      });
    }
  }

  const MeshSchedule& schedule_;
  const size_t in_flight_;
  std::vector<std::vector<MeshPhase>> phases_;  // by chunk
  std::vector<int> passed_;                     // phases, by chunk
  std::vector<size_t> taken_;                   // phases, by dimension
  std::vector<std::vector<Flight>> in_hand_;    // by dimension
  std::vector<LinePhase> launched_;
};

Playing playing(const Topology& topology, const MeshSchedule& schedule, double bytes,
                int in_flight) {
  if (in_flight < 1 || !(bytes >= 0 && std::isfinite(bytes))) {
    throw UsageError("mesh: a schedule for " + std::to_string(bytes) + " bytes with " +
                     std::to_string(in_flight) + " phases in flight");
  }
  schedule.validate(topology);
  return {topology, schedule, bytes, in_flight};
}

}  // namespace

double simulate_schedule(const Topology& topology, const MeshSchedule& schedule, double bytes,
                         int in_flight) {
  return playing(topology, schedule, bytes, in_flight).run();
}

std::vector<LinePhase> launch_order(const Topology& topology, const MeshSchedule& schedule,
                                    double bytes, int in_flight) {
  Playing all = playing(topology, schedule, bytes, in_flight);
  all.run();
  return all.launched();
}

}  // namespace usbyte
