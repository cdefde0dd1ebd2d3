// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "random_profile.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

double real(std::mt19937& rng, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(rng);
}

Profile small_job(std::mt19937& rng) {
  const auto count = static_cast<size_t>(uniform(rng, 2, 3));
  Profile p;
  double now = 0;
  int64_t offset = 0;
  std::vector<double> forward_s;
  for (size_t i = 0; i < count; ++i) {
    const auto numel = static_cast<int64_t>(std::exp(real(rng, std::log(1e4), std::log(3e7))));
    p.tensors.push_back({"t" + std::to_string(i), numel, DType::float32, offset});
    offset += numel;
    forward_s.push_back(real(rng, 0, 0.02));
    p.need_s.push_back(now);
    now += forward_s.back();
  }
  p.ready_s.resize(count);
  for (size_t i = count; i-- > 0;) {
    now += real(rng, 0.5, 3) * forward_s[i];
    p.ready_s[i] = now;
  }
  p.step_s = now;
  return p;
}

// Reduce-scatters and all-gathers of about half an all_reduce each, up to two ops in flight.
NetworkModel network_for(std::mt19937& rng, const Profile& p) {
  const double beta = real(rng, 0.2, 3) * p.step_s / static_cast<double>(p.bytes());
  const double alpha = uniform(rng, 0, 3) ? real(rng, 0, 0.1) * p.step_s : 0;
  const auto half = [&] {
    return AlphaBeta{real(rng, 0.4, 0.7) * alpha, real(rng, 0.45, 0.55) * beta};
  };
  NetworkModel network{4, {{alpha, beta}}};
  network.reduce_scatter = {half()};
  network.all_gather = {half()};
  network.concurrent = static_cast<int>(uniform(rng, 1, 2));
  return network;
}

// An all_reduce, or one half of what takes its place, of the group of that number.
struct Part {
  size_t group;
  bool gather;
  auto operator<=>(const Part&) const = default;
};

// The shortest step of all plans whose ops are neighbouring whole tensors: every grouping, every
// choice between all_reduce and reduce_scatter with all_gather, every launch order.
double shortest_step_s(const Profile& p, const NetworkModel& network) {
  Simulator simulator(p, network, Overlap::forward);
  const Plan layout = make_plan("wfbp", p, network);
  double best_s = std::numeric_limits<double>::infinity();
  const size_t gaps = p.tensors.size() - 1;
  for (size_t cuts = 0; cuts < size_t{1} << gaps; ++cuts) {
    std::vector<Block> groups;
    for (size_t i = 0; i < p.tensors.size(); ++i) {
      const TensorSpec& t = p.tensors[i];
      if (i == 0 || (cuts >> (i - 1) & 1)) groups.push_back({t.offset, t.end()});
      groups.back().end = t.end();
    }
    for (size_t split = 0; split < size_t{1} << groups.size(); ++split) {
      std::vector<Part> parts;
      for (size_t g = 0; g < groups.size(); ++g) {
        parts.push_back({g, false});
        if (split >> g & 1) parts.push_back({g, true});
      }
      do {
        std::vector<bool> scattered(groups.size());
        const bool possible = std::ranges::all_of(parts, [&](const Part& part) {
          if (part.gather) return bool{scattered[part.group]};
          scattered[part.group] = true;
          return true;
        });
        if (!possible) continue;
        for (int in_flight = 1; in_flight <= network.concurrent; ++in_flight) {
          std::vector<Op> ops;
          std::vector<int64_t> launched = {0};
          for (const Part& part : parts) {
            const Collective kind = part.gather               ? Collective::all_gather
                                    : split >> part.group & 1 ? Collective::reduce_scatter
                                                              : Collective::all_reduce;
            ops.push_back({kind, {groups[part.group]}, 1});
            launched.push_back(launched.back() + layout.bytes(ops.back()));
            const auto outside = std::max<std::ptrdiff_t>(std::ssize(ops) - in_flight, 0);
            ops.back().window_bytes = launched.back() - launched[static_cast<size_t>(outside)];
          }
          best_s = std::min(best_s, simulator.step_s(layout.with_ops("any", std::move(ops))));
        }
      } while (std::next_permutation(parts.begin(), parts.end()));
    }
  }
  return best_s;
}

TEST(AutoOptimum, IsAtMostHalfAPercentBehindAnyPlanOfWholeTensors) {
  std::mt19937 rng(1);
  for (int i = 0; i < cases(120); ++i) {
    const Profile p = small_job(rng);
    const NetworkModel network = network_for(rng, p);
    Simulator simulator(p, network, Overlap::forward);
    const double best_s = shortest_step_s(p, network);
    EXPECT_LE(simulator.step_s(make_plan("auto", p, network)), 1.005 * best_s) << "case " << i;
  }
}

}  // namespace
}  // namespace usbyte
