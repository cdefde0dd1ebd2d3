#include "coding_thread.h"

#include <utility>

#include "usbyte/codec.h"

namespace usbyte {

CodingThread::CodingThread(const Plan& plan, const CodecCosts& costs, int ranks) {
  times_.resize(plan.ops().size());
  for (size_t i = 0; i < times_.size(); ++i) {
    const Op& op = plan.ops()[i];
    if (op.codec == "none") continue;
    const CodecCost cost = costs.of(op.codec);
    int64_t elements = 0;
    for (Block b : op.blocks) elements += b.numel();
    const int64_t bytes = elements * itemsize(DType::float32);
    const bool whole = op.kind == Collective::all_reduce;
    const bool first = op.kind == Collective::reduce_scatter;
    const auto codec = make_codec(op.codec);
    if (!whole && codec->matrices()) {
      times_[i] = {cost.encode.time_s(bytes) / 2, first ? 0 : cost.decode.time_s(bytes)};
      continue;
    }
    // A rank decodes messages of all ranks: of the whole, or of its shard; or all shards' once.
    const bool gathered = whole && !codec->adds();
    const int64_t own = whole || first ? bytes : bytes / ranks;
    times_[i] = {cost.encode.time_s(own), cost.decode.time_s(bytes) * (gathered ? ranks : 1)};
  }
}

void CodingThread::put(const Job& job, double now_s) {
  waiting_.insert(job);
  if (!busy_) next_s_ = now_s;
}

bool CodingThread::advance() {
  const bool ends = std::exchange(busy_, false);
  if (ends) {
    if (waiting_.empty()) next_s_ = std::numeric_limits<double>::infinity();
    return true;
  }
  running_ = waiting_.extract(waiting_.begin()).value();
  const Times& times = times_[static_cast<size_t>(running_.op)];
  next_s_ += running_.decodes ? times.decode_s : times.encode_s;
  busy_ = true;
  return false;
}

}  // namespace usbyte
