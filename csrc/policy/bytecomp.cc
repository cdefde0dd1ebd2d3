#include "usbyte/bytecomp.h"

#include <algorithm>

#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"

namespace usbyte {
namespace {

// Whether plans admit codecs on reduce_scatters and all_gathers.
bool halves_can_be_coded() {
  static const bool can = [] {
    try {
      Plan("bytecomp", {{"t", 2, DType::float32, 0}},
           {{Collective::reduce_scatter, {{0, 2}}, 8, false, "int8"},
            {Collective::all_gather, {{0, 2}}, 8, false, "int8"}});
      return true;
    } catch (const PlanError&) {
      return false;
    }
  }();
  return can;
}

// Those that the engine can run; it codes on the CPU.
std::vector<Strategy> executable() {
  std::vector<Strategy> out;
  for (const char* text : {"AR", "RS AG", "C[cpu] AR D[cpu]", "C[cpu] AG D[cpu]"}) {
    out.push_back(Strategy::parse(text));
  }
  if (halves_can_be_coded()) {
    out.push_back(Strategy::parse("C[cpu] A2A D[cpu] C[cpu] AG D[cpu]"));
  }
  return out;
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
  const CompressionCluster cluster = CompressionCluster::of(network, {}, options.codec_costs);
  const CompressionJob job = CompressionJob::of(profile, options.overlap, options.codec_of);
  const std::vector<Strategy> strategies = select_strategies(job, cluster, executable()).strategies;
  const std::vector<int> backward = backward_order(profile);
  std::vector<Op> ops;
  for (const ScheduledStage& stage : schedule(job, cluster, strategies)) {
    const auto t = static_cast<size_t>(stage.tensor);
    const TensorSpec& tensor = profile.tensors[static_cast<size_t>(backward[t])];
    const std::string codec = strategies[t].compresses() ? job.tensors[t].codec : "none";
    const int64_t bytes = codec == "none" ? tensor.numel * itemsize(tensor.dtype)
                                          : make_codec(codec)->message_bytes(tensor.numel);
    ops.push_back({collective_of(strategies[t], static_cast<size_t>(stage.stage)),
                   {{tensor.offset, tensor.end()}},
                   std::max<int64_t>(bytes, 1),
                   false,
                   codec});
  }
  return Plan("bytecomp", profile.tensors, std::move(ops));
}

}  // namespace usbyte
