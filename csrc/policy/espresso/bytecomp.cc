// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cluster.h"
#include "select.h"
#include "strategy.h"
#include "timeline.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"

namespace usbyte {
namespace {

// Those that the engine can run; it codes beside compute, on a thread or on streams of its own.
std::vector<Strategy> executable() {
  std::vector<Strategy> out;
  for (const char* text : {"AR", "RS AG", "C[cpu] AR D[cpu]", "C[cpu] AG D[cpu]",
                           "C[cpu] A2A D[cpu] AG", "C[cpu] A2A D[cpu] C[cpu] AG D[cpu]"}) {
    out.push_back(Strategy::parse(text));
  }
  return out;
}

// Coding is free where nothing is known of it.
CodecCosts costs_for(const CompressionJob& job, const PolicyOptions& options) {
  CodecCosts costs = options.codec_costs;
  if (!costs.by_spec.empty()) return costs;
  for (const CompressionJob::Tensor& tensor : job.tensors) {
    if (const auto codec = make_codec(tensor.codec)) costs.by_spec[codec->spec()] = {};
  }
  return costs;
}

// A plan speaks of what is done to gradients: to gather messages and add them up is to all_reduce.
Collective collective_of(const Strategy& strategy, size_t stage) {
  const bool scattered = std::any_of(strategy.stages.begin(), strategy.stages.end(), [](auto s) {
    return s.kind == StageKind::reduce_scatter || s.kind == StageKind::all_to_all;
  });
  if (!scattered) return Collective::all_reduce;
  return strategy.stages[stage].kind == StageKind::all_gather ? Collective::all_gather
                                                              : Collective::reduce_scatter;
}

}  // namespace

Plan bytecomp(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  const CompressionJob job = CompressionJob::of(profile, options.overlap, options.codec_of);
  const CompressionCluster cluster = CompressionCluster::of(network, {}, costs_for(job, options));
  const bool compressible = std::any_of(job.tensors.begin(), job.tensors.end(),
                                        [](const auto& tensor) { return tensor.codec != "none"; });
  const std::vector<Strategy> strategies =
      select_strategies(job, cluster, executable(), compressible ? kStrategyWork : 0).strategies;
  const std::vector<int> backward = backward_order(profile);
  std::vector<Op> ops;
  for (const ScheduledStage& stage : schedule(job, cluster, strategies)) {
    const auto t = static_cast<size_t>(stage.tensor);
    const TensorSpec& tensor = profile.tensors[static_cast<size_t>(backward[t])];
    const auto s = static_cast<size_t>(stage.stage);
    const bool coded = s > 0 && strategies[t].stages[s - 1].kind == StageKind::encode;
    const std::string codec = coded ? job.tensors[t].codec : "none";
    const int64_t bytes = codec == "none" ? tensor.numel * itemsize(tensor.dtype)
                                          : make_codec(codec)->message_bytes(tensor.numel);
    ops.push_back({collective_of(strategies[t], s),
                   {{tensor.offset, tensor.end()}},
                   std::max<int64_t>(bytes, 1),
                   false,
                   codec});
  }
  return Plan("bytecomp", profile.tensors, std::move(ops));
}

}  // namespace usbyte
