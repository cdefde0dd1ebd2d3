// SPDX-License-Identifier: Apache-2.0
#include "usbyte/policy.h"

#include "policy/support/priority_trace.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

// In the spelling that plans have; empty if nothing is compressed.
std::vector<std::string> checked_codecs(const Profile& profile, const PolicyOptions& options) {
  if (options.codec_of.empty()) return {};
  if (options.codec_of.size() != profile.tensors.size()) {
    throw UsageError("policy options: " + std::to_string(options.codec_of.size()) + " codecs for " +
                     std::to_string(profile.tensors.size()) +
                     " tensors; give one for each, \"none\" for what is not compressed");
  }
  std::vector<std::string> out;
  bool any = false;
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    const auto codec = make_codec(options.codec_of[i]);
    out.push_back(codec ? codec->spec() : "none");
    if (!codec) continue;
    any = true;
    const TensorSpec& t = profile.tensors[i];
    if (!is_floating(t.dtype)) {
      throw UsageError("policy options: codec " + out.back() + " cannot code '" + t.name +
                       "', which is of " + std::string(name(t.dtype)) + "; give it \"none\"");
    }
    if (!options.codec_costs.by_spec.empty()) options.codec_costs.of(out.back());
  }
  return any ? out : std::vector<std::string>{};
}

// For policies that do not send matrices as a whole.
void check_whole(const PolicyOptions& options) {
  for (const std::string& spec : options.codec_of) {
    const auto codec = make_codec(spec);
    if (codec && codec->matrices()) {
      throw UsageError("policy 'bytecomp' has no strategy for codec " + spec +
                       ", which takes two rounds; take policy auto");
    }
  }
}

}  // namespace

const std::map<std::string, PolicyEntry, std::less<>>& policies() {
  static const std::map<std::string, PolicyEntry, std::less<>> all = {
      {"auto", {.plan = automatic, .shards = true, .knows_codecs = true}},
      {"bytecomp", {.plan = bytecomp, .knows_codecs = true}},
      {"bytescheduler", {.plan = bytescheduler, .count_parts = bytescheduler_parts}},
      {"dcredit", {.plan = dcredit}},
      {"ddp", {.plan = ddp}},
      {"dear", {.plan = dear, .shards = true}},
      {"dear_exact", {.plan = dear_exact, .shards = true}},
      {"mergecomp", {.plan = mergecomp, .knows_codecs = true}},
      {"mgwfbp", {.plan = mgwfbp}},
      {"p3", {.plan = p3, .count_parts = p3_parts}},
      {"pipedap", {.plan = pipedap}},
      {"themis", {.plan = themis}},
      {"us-byte", {.plan = us_byte}},
      {"wfbp", {.plan = wfbp}},
  };
  return all;
}

std::vector<std::string> sharding_policies() {
  std::vector<std::string> names;
  for (const auto& [name, entry] : policies()) {
    if (entry.shards) names.push_back(name);
  }
  return names;
}

Plan make_plan(std::string_view name, const Profile& profile, const NetworkModel& network,
               const PolicyOptions& options) {
  const std::string policy = policy_name(name);
  auto it = policies().find(policy);
  if (it == policies().end()) {
    std::string known;
    for (const auto& [key, unused] : policies()) known += (known.empty() ? "" : ", ") + key;
    throw UsageError("unknown policy '" + policy + "'; known are " + known);
  }
  for (int64_t bytes : {options.bucket_bytes, options.first_bucket_bytes, options.partition_bytes,
                        options.credit_bytes, options.unit_bytes, options.fusion_bytes}) {
    if (bytes <= 0) throw UsageError("policy options: sizes must be positive bytes");
  }
  profile.validate();
  for (const TensorSpec& t : profile.tensors) {
    if (t.sparse()) {
      throw UsageError("make_plan: '" + t.name +
                       "' is sparse, and policies plan dense tensors: plan without it, and add its "
                       "sparse_all_reduce");
    }
  }
  if (policy == "bytecomp") check_whole(options);
  PolicyOptions given = options;
  const std::vector<std::string> codecs = checked_codecs(profile, options);
  given.codec_of = it->second.knows_codecs ? codecs : std::vector<std::string>{};
  for (std::string& spec : given.codec_of) {  // matrices are taken out of groups as a whole
    if (policy != "mergecomp") break;
    if (const auto codec = make_codec(spec); codec && codec->matrices()) spec = "none";
  }
  Plan plan = it->second.plan(profile, network, given);
  if (!codecs.empty()) {
    std::vector<std::string> rest = codecs;
    for (size_t i = 0; i < given.codec_of.size(); ++i) {
      if (given.codec_of[i] == codecs[i]) rest[i] = "none";
    }
    plan = with_codecs(plan, rest, options.sharded);
  }
  if (options.sharded) {
    bool gathers = false;
    for (const Op& op : plan.ops()) {
      const bool gather = op.kind == Collective::all_gather;
      if (op.kind == Collective::all_reduce || (gathers && !gather)) {
        std::string sharding;
        for (const std::string& known : sharding_policies()) {
          sharding += (sharding.empty() ? "" : ", ") + known;
        }
        throw UsageError("policy '" + policy +
                         "' does not scatter everything before it gathers; a sharded optimizer "
                         "needs one of " +
                         sharding);
      }
      gathers |= gather;
    }
  }
  return plan;
}

}  // namespace usbyte
