#include "usbyte/policy.h"

#include "usbyte/error.h"

namespace usbyte {

const std::map<std::string, Policy, std::less<>>& policies() {
  static const std::map<std::string, Policy, std::less<>> all = {
      {"auto", automatic},  {"bytescheduler", bytescheduler},
      {"dcredit", dcredit}, {"ddp", ddp},
      {"dear", dear},       {"dear_exact", best_dear},
      {"mgwfbp", mgwfbp},   {"p3", p3},
      {"pipedap", pipedap}, {"usbyte", usbyte},
      {"wfbp", wfbp}};
  return all;
}

Plan make_plan(std::string_view policy, const Profile& profile, const NetworkModel& network,
               const PolicyOptions& options) {
  auto it = policies().find(policy);
  if (it == policies().end()) {
    std::string known;
    for (const auto& [key, unused] : policies()) known += (known.empty() ? "" : ", ") + key;
    throw UsageError("unknown policy '" + std::string(policy) + "'; known are " + known);
  }
  for (int64_t bytes : {options.bucket_bytes, options.first_bucket_bytes, options.partition_bytes,
                        options.credit_bytes, options.unit_bytes, options.fusion_bytes}) {
    if (bytes <= 0) throw UsageError("policy options: sizes must be positive bytes");
  }
  profile.validate();
  Plan plan = it->second(profile, network, options);
  if (options.sharded) {
    bool gathers = false;
    for (const Op& op : plan.ops()) {
      const bool gather = op.kind == Collective::all_gather;
      if (op.kind == Collective::all_reduce || (gathers && !gather)) {
        throw UsageError("policy '" + std::string(policy) +
                         "' does not scatter everything before it gathers; a sharded optimizer "
                         "needs auto, dear or dear_exact");
      }
      gathers |= gather;
    }
  }
  return plan;
}

}  // namespace usbyte
