// SPDX-License-Identifier: Apache-2.0
#include "coding_thread.h"

#include <utility>

#include "plan/dimension_path.h"
#include "usbyte/codec.h"
#include "usbyte/sparse.h"

namespace usbyte {

// Each block, or shard of one, is a message of its own.
CodingThread::Times CodingThread::times_of(const Plan& plan, const Op& op, const CodecCosts& costs,
                                           int ranks) {
  const CodecCost cost = costs.of(op.codec);
  const auto codec = make_codec(op.codec);
  const bool whole = op.kind == Collective::all_reduce;
  const bool scatters = op.kind == Collective::reduce_scatter;
  const bool round = codec->matrices() && !whole;      // one of two
  const bool gathers = !whole && !scatters && !round;  // a message of each shard
  const int64_t encodes = scatters && !round ? ranks : 1, parts = gathers ? ranks : 1;
  int64_t decodes = whole || scatters ? ranks : 1;  // of each part
  if (whole && (codec->adds() || !op.scheme.empty())) decodes = 1;
  if (round && scatters) decodes = 0;
  Times out;
  int64_t all = 0;
  for (Block b : op.blocks) {
    const Block coded = whole || round ? b : shard(b, 0, ranks);
    const int64_t bytes = coded.numel() * itemsize(DType::float32);
    all += bytes;
    out.encode_s += cost.encode_s(encodes, bytes);
    out.decode_s += cost.decode_s(parts, decodes, bytes);
  }
  if (cost.at_once) out = {cost.encode_s(encodes, all), cost.decode_s(parts, decodes, all)};
  if (round) out.encode_s /= 2;  // as costs are of both
  if (!op.scheme.empty()) {
    out.decode_s += costs.row_s * rows_handled(plan.shape(op), plan.density(op, ranks), ranks);
  }
  return out;
}

CodingThread::CodingThread(const Plan& plan, const CodecCosts& costs, const NetworkModel& network) {
  for (const Op& op : plan.ops()) {
    if (op.codec == "none") {
      times_.push_back({});
    } else if (op.dimension >= 0 && network.topology) {
      Op own = op;
      own.blocks = worked_on(op, &*network.topology, 0);
      times_.push_back(times_of(plan, own, costs, dimension_of(op, *network.topology).size));
    } else {
      times_.push_back(times_of(plan, op, costs, network.ranks));
    }
  }
}

void CodingThread::put(const Task& task, double now_s) {
  waiting_.insert(task);
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
