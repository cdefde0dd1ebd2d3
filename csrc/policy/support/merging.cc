// SPDX-License-Identifier: Apache-2.0
#include "merging.h"

#include <algorithm>

#include "merge_adjacent.h"

namespace usbyte {

Merging::Merging(const Profile& profile, const NetworkModel& network, const PolicyOptions& options)
    : profile_(&profile),
      network_(&network),
      coding_takes_time_(!options.codec_costs.by_spec.empty()),
      order_(backward_order(profile)),
      due_s_(due_times(profile, options.overlap)),
      group_of_(profile.tensors.size(), -1),
      first_(profile.tensors.size()),
      last_(profile.tensors.size()) {
  for (size_t t = 0; t < profile.tensors.size(); ++t) {
    const std::string spec = options.codec_of.empty() ? "none" : options.codec_of[t];
    const DType dtype = profile.tensors[t].dtype;
    auto it = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
      return lane.spec == spec && lane.dtype == dtype;
    });
    lane_of_.push_back(static_cast<int>(it - lanes_.begin()));
    if (it != lanes_.end()) continue;
    const CodecCost cost = coding_takes_time_ ? options.codec_costs.of(spec) : CodecCost{};
    lanes_.push_back({spec, make_codec(spec), dtype, cost});
  }
}

void Merging::start(int end) {
  begin_ = end;
  ++group_;
  parts_.clear();
}

int64_t Merging::message_bytes(const Lane& lane, int first, int last) const {
  const int64_t count = profile_->tensors[at(last)].end() - profile_->tensors[at(first)].offset;
  return lane.codec ? lane.codec->message_bytes(count) : count * itemsize(lane.dtype);
}

// Of which a block is decoded.
int Merging::messages(const Lane& lane) const {
  return lane.codec && !lane.codec->adds() ? network_->ranks : 1;
}

bool Merging::grouped(int tensor, int lane) const {
  return tensor >= 0 && tensor < tensors() && group_of_[at(tensor)] == group_ &&
         lane_of_[at(tensor)] == lane;
}

void Merging::extend() {
  const int t = order_[at(--begin_)], lane = lane_of_[at(t)];
  auto part =
      std::find_if(parts_.begin(), parts_.end(), [&](const LaneOp& p) { return p.lane == lane; });
  if (part == parts_.end()) {
    part = parts_.insert(part, {lane, profile_->ready_s[at(t)], due_s_[at(t)]});
  }
  int first = t, last = t;  // of the block that it becomes part of
  const auto count = [&](int from, int to, int sign) {
    const Lane& l = lanes_[at(lane)];
    const int64_t elements = profile_->tensors[at(to)].end() - profile_->tensors[at(from)].offset;
    const int64_t bytes = elements * itemsize(DType::float32);
    part->message_bytes += sign * message_bytes(l, from, to);
    part->blocks += sign;
    part->bytes += sign * bytes;
    part->encode_s += sign * l.cost.encode_s(1, bytes);
    part->decode_s += sign * l.cost.decode_s(1, messages(l), bytes);
  };
  const auto join = [&](int from, int to) {
    count(from, to, -1);
    first = std::min(first, from);
    last = std::max(last, to);
  };
  if (grouped(t - 1, lane)) join(first_[at(t - 1)], t - 1);
  if (grouped(t + 1, lane)) join(t + 1, last_[at(t + 1)]);
  first_[at(last)] = first;
  last_[at(first)] = last;
  group_of_[at(t)] = group_;
  count(first, last, 1);
  part->due_s = std::min(part->due_s, due_s_[at(t)]);
}

const std::vector<OpTimes>& Merging::times() {
  times_.clear();
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    times_.push_back(times_of(*part));
  }
  return times_;
}

OpTimes Merging::times_of(const LaneOp& part) const {
  const Lane& lane = lanes_[at(part.lane)];
  const bool gathered = lane.codec && !lane.codec->adds();
  const Collective kind = gathered ? Collective::all_gather : Collective::all_reduce;
  const int64_t bytes = part.message_bytes * (gathered ? network_->ranks : 1);
  const AlphaBeta cost = network_->cost(kind, 1);
  OpTimes out{
      part.queued_s, 0, cost.time_s(bytes), 0, part.due_s, lane.codec && coding_takes_time_};
  if (network_->one_shot.takes(kind, bytes)) {
    const double work_s = cost.beta_s_per_byte * static_cast<double>(bytes);
    out.send_s =
        std::max(network_->one_shot.latency_s, work_s * std::max(network_->ranks / 2.0, 1.0));
  } else if (!lane.codec && part.blocks > 1) {
    out.send_s += network_->pack_s_per_byte * static_cast<double>(bytes);
  }
  if (out.coded) {
    const bool at_once = lane.cost.at_once;
    out.encode_s = at_once ? lane.cost.encode_s(1, part.bytes) : part.encode_s;
    out.decode_s = at_once ? lane.cost.decode_s(1, messages(lane), part.bytes) : part.decode_s;
  }
  return out;
}

Plan Merging::plan(std::string policy, const std::vector<int>& ends) const {
  std::vector<Op> ops;
  int begin = 0;
  for (int end : ends) {
    std::vector<std::pair<int, std::vector<Block>>> parts;  // by lane, ready last first
    for (int i = end; i-- > begin;) {
      const TensorSpec& t = profile_->tensors[at(order_[at(i)])];
      const int lane = lane_of_[at(order_[at(i)])];
      auto part =
          std::find_if(parts.begin(), parts.end(), [&](const auto& p) { return p.first == lane; });
      if (part == parts.end()) part = parts.insert(part, {lane, {}});
      part->second.push_back({t.offset, t.end()});
    }
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      const Lane& lane = lanes_[at(part->first)];
      int64_t bytes = 0;
      for (Block b : part->second) bytes += b.numel() * itemsize(lane.dtype);
      ops.push_back({Collective::all_reduce, merge_adjacent(std::move(part->second)), bytes, true,
                     lane.spec});
    }
    begin = end;
  }
  return Plan(std::move(policy), profile_->tensors, std::move(ops));
}

}  // namespace usbyte
