// SPDX-License-Identifier: Apache-2.0
#include "usbyte/policy.h"

#include <algorithm>
#include <array>

#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

// They plan with codecs; the plans of others get them afterwards.
constexpr std::array<std::string_view, 3> kKnowCodecs = {"auto", "bytecomp", "mergecomp"};

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

const std::map<std::string, Policy, std::less<>>& policies() {
  static const std::map<std::string, Policy, std::less<>> all = {{"auto", automatic},
                                                                 {"bytecomp", bytecomp},
                                                                 {"bytescheduler", bytescheduler},
                                                                 {"dcredit", dcredit},
                                                                 {"ddp", ddp},
                                                                 {"dear", dear},
                                                                 {"dear_exact", best_dear},
                                                                 {"mergecomp", mergecomp},
                                                                 {"mgwfbp", mgwfbp},
                                                                 {"p3", p3},
                                                                 {"pipedap", pipedap},
                                                                 {"themis", themis},
                                                                 {"us-byte", us_byte},
                                                                 {"wfbp", wfbp}};
  return all;
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
  const bool knows = std::find(kKnowCodecs.begin(), kKnowCodecs.end(), policy) != kKnowCodecs.end();
  given.codec_of = knows ? codecs : std::vector<std::string>{};
  for (std::string& spec : given.codec_of) {  // matrices are taken out of groups as a whole
    if (policy != "mergecomp") break;
    if (const auto codec = make_codec(spec); codec && codec->matrices()) spec = "none";
  }
  Plan plan = it->second(profile, network, given);
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
        throw UsageError("policy '" + policy +
                         "' does not scatter everything before it gathers; a sharded optimizer "
                         "needs auto, dear or dear_exact");
      }
      gathers |= gather;
    }
  }
  return plan;
}

}  // namespace usbyte
