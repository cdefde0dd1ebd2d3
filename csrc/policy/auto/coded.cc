// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>
#include <vector>

#include "candidates.h"
#include "coded.h"
#include "rivals.h"
#include "search.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr SearchEffort kEffort{kSearchWork / 4, 1};  // of each of two searches

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
  Candidates all;
  const auto consider = [&](Plan plan) {
    const double lateness_s = simulator.lateness_s(plan);
    const size_t ops = plan.ops().size();
    all.add(lateness_s, {ops, ops}, std::move(plan));
  };
  const Plan usual = make_plan(options.sharded ? "dear" : "ddp", profile, network, options);
  consider(usual);
  if (all.least_s() <= 0) return usual.with_ops("auto", usual.ops());  // all is hidden
  for_each_rival(profile, network, options, consider);
  const double others_s = all.least_s();
  PolicyOptions plain = options;
  plain.codec_of.clear();
  // Cut for the bytes that there are, also without any codec, and for those that will travel.
  const Plan whole = automatic_searched(profile, network, plain, kEffort);
  consider(whole);
  consider(with_codecs(whole, options.codec_of, options.sharded));
  const NetworkModel assumed = network.scaled(1, share(profile, network, options));
  const Plan coded = automatic_searched(profile, assumed, plain, kEffort);
  consider(with_codecs(coded, options.codec_of, options.sharded));
  const Plan& best = all.choose(std::max(others_s, 0.0), kAlmost * profile.iteration_s());
  return best.with_ops("auto", best.ops());
}

}  // namespace usbyte
