// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>
#include <vector>

#include "candidates.h"
#include "coded.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

// What a byte of gradients takes on the network when it is coded, over what it takes as it is.
double share(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  PolicyOptions plain = options;
  plain.codec_of.clear();
  plain.sharded = false;
  const Plan each = wfbp(profile, network, plain);  // an op for each tensor
  const auto time_s = [&](const Plan& plan) {
    double sum = 0;
    for (const Op& op : plan.ops()) {
      const auto [kind, bytes] = plan.traffic(op, network.ranks);
      sum += network.cost(kind, 1).beta_s_per_byte * static_cast<double>(bytes);
    }
    return sum;
  };
  const double whole = time_s(each);
  return whole > 0 ? time_s(with_codecs(each, options.codec_of)) / whole : 1;
}

}  // namespace

Plan automatic_coded(const Profile& profile, const NetworkModel& network,
                     const PolicyOptions& options) {
  Simulator simulator(profile, network, options.overlap, options.sharded, options.codec_costs);
  std::vector<Candidate> all;
  const auto consider = [&](Plan plan) {
    const double lateness_s = simulator.lateness_s(plan);
    const size_t ops = plan.ops().size();
    all.push_back({lateness_s, {ops, ops}, std::move(plan)});
  };
  consider(make_plan(options.sharded ? "dear" : "ddp", profile, network, options));
  for (const auto& [name, entry] : policies()) {
    if (name == "auto" || name == "bytecomp" || (options.sharded && !entry.shards)) continue;
    consider(make_plan(name, profile, network, options));
  }
  // Cut for the bytes that there are, and for those that will travel.
  PolicyOptions plain = options;
  plain.codec_of.clear();
  const double coded = share(profile, network, options);
  for (const NetworkModel& assumed : {network, network.scaled(1, coded)}) {
    consider(with_codecs(automatic(profile, assumed, plain), options.codec_of, options.sharded));
  }
  const Plan& fallback = all.front().plan;
  const Plan& best = choose(all, 0, kAlmost * profile.iteration_s(), TieBreak::least_late).plan;
  const bool worthwhile = simulator.step_s(best) < simulator.step_s(fallback) * (1 - kWorthwhile);
  return (worthwhile ? best : fallback).with_ops("auto", (worthwhile ? best : fallback).ops());
}

}  // namespace usbyte
