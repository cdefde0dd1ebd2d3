#include <optional>
#include <string>
#include <utility>

#include "auto_coded.h"
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
  std::optional<Plan> best;
  double best_s = 0;
  const auto consider = [&](Plan plan) {
    const double step_s = simulator.step_s(plan);
    if (best && step_s >= best_s) return;
    best_s = step_s;
    best = std::move(plan);
  };
  for (const auto& [name, policy] : policies()) {
    const bool scatters = name == "dear" || name == "dear_exact";
    if (name == "auto" || name == "bytecomp" || (options.sharded && !scatters)) continue;
    consider(make_plan(name, profile, network, options));
  }
  // Cut for the bytes that there are, and for those that will travel.
  PolicyOptions plain = options;
  plain.codec_of.clear();
  const double coded = share(profile, network, options);
  for (const NetworkModel& assumed : {network, network.scaled(1, coded)}) {
    consider(with_codecs(automatic(profile, assumed, plain), options.codec_of, options.sharded));
  }
  return best->with("auto", best->ops());
}

}  // namespace usbyte
