// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <queue>
#include <string_view>

#include "batching.h"
#include "candidates.h"
#include "coarse.h"
#include "coded.h"
#include "local_search.h"
#include "rivals.h"
#include "routed.h"
#include "search.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr double kSimpler = 0.002;    // of the iteration: what fewer ops may cost
constexpr double kCredited = 0.5;     // of the overlap of startups, while searching
constexpr size_t kManyTensors = 250;  // of which most are too small to search with each
constexpr double kRounding = 1e-9;    // of a step
constexpr int64_t kParts = 400;       // of a job with as many; 0.25 % of its bytes and time each

// How a draft is made.
struct HeuristicParams {
  int in_flight;
  bool split;
  AlphaBeta cost;      // for how long an op takes up the channel
  double least_bytes;  // of an op in backward, if that much is there
};

// Plays out one iteration. In backward, whenever the channel is free, the ready bytes nearest to
// the input go next, with what follows them in the flat buffer: as many as can be sent until the
// next gradient appears, but no op below `least_bytes` if there is more. An op whose bytes are less
// than half of its time waits for the next gradient and goes with it. After backward, what is left
// goes in the order of due dates, in the best batches of that order.
class PlanBuilder {
 public:
  PlanBuilder(const Profile& profile, const Plan& layout, const std::vector<double>& due_s)
      : profile_(profile), layout_(layout), due_s_(due_s), backward_(backward_order(profile)) {
    by_due_.resize(due_s.size());
    for (size_t i = 0; i < by_due_.size(); ++i) by_due_[i] = static_cast<int>(i);
    std::stable_sort(by_due_.begin(), by_due_.end(),
                     [&](int a, int b) { return due_s_[at(a)] < due_s_[at(b)]; });
    rank_.resize(by_due_.size());
    for (size_t i = 0; i < by_due_.size(); ++i) rank_[at(by_due_[i])] = static_cast<int>(i);
  }

  Draft draft(const HeuristicParams& params) {
    Draft out{{}, params.in_flight};
    sent_.assign(due_s_.size(), 0);
    ready_.assign(due_s_.size(), false);
    std::priority_queue<int, std::vector<int>, std::greater<>> queue;  // ranks by due date
    const double s_per_byte = params.cost.beta_s_per_byte;
    double now = 0;
    for (size_t next = 0; next < backward_.size();) {
      const double release = profile_.ready_s[at(backward_[next])];
      while (!queue.empty() && rest(by_due_[at(queue.top())]) == 0) queue.pop();
      if (release <= now || queue.empty()) {
        now = std::max(now, release);
        ready_[at(backward_[next])] = true;
        queue.push(rank_[at(backward_[next++])]);
        continue;
      }
      const double fill = std::max(
          (std::max(release - now, params.cost.alpha_s) - params.cost.latency_s()) / s_per_byte,
          params.least_bytes);
      const std::vector<Block> blocks = gather(by_due_[at(queue.top())], fill);
      const int64_t bytes = layout_.bytes({{}, blocks});
      const double length = params.cost.time_s(bytes);
      if (2 * s_per_byte * static_cast<double>(bytes) < length && release - now < length) {
        now = release;
        continue;
      }
      mark(blocks);
      out.ops.push_back({blocks, params.split});
      now += length;
    }
    finish(out, params, now);
    return out;
  }

 private:
  static size_t at(int i) { return static_cast<size_t>(i); }
  int64_t rest(int t) const { return profile_.tensors[at(t)].numel - sent_[at(t)]; }

  // Unsent ready elements from tensor t on along the flat buffer, about `bytes` of them.
  std::vector<Block> gather(int t, double bytes) const {
    const TensorSpec& first = profile_.tensors[at(t)];
    const double width = static_cast<double>(itemsize(first.dtype));
    // Rounded up, and never so that a crumb is left behind.
    double room = std::max(bytes / width, 1.0);
    Block block{first.offset + sent_[at(t)], first.offset + sent_[at(t)]};
    for (size_t i = at(t); i < profile_.tensors.size() && room > 0; ++i) {
      const TensorSpec& spec = profile_.tensors[i];
      const int64_t left = rest(static_cast<int>(i));
      const bool adjacent = spec.offset + sent_[i] == block.end;
      if (!ready_[i] || left == 0 || !adjacent || spec.dtype != first.dtype) break;
      const double all = static_cast<double>(left);
      const int64_t n = all <= room * 1.25 ? left : static_cast<int64_t>(room) + 1;
      block.end += std::min(n, left);
      room -= static_cast<double>(n);
      if (n < left) break;
    }
    return {block};
  }

  void mark(const std::vector<Block>& blocks) {
    for (Block b : blocks) {
      for (int t : layout_.tensors_of({Collective::all_reduce, {b}})) {
        const TensorSpec& spec = profile_.tensors[at(t)];
        sent_[at(t)] += std::min(b.end, spec.end()) - std::max(b.begin, spec.offset);
      }
    }
  }

  void finish(Draft& out, const HeuristicParams& params, double now) const {
    std::vector<int> left;
    std::vector<double> length, due;
    for (int t : by_due_) {
      if (rest(t) == 0) continue;
      const TensorSpec& spec = profile_.tensors[at(t)];
      left.push_back(t);
      length.push_back(params.cost.beta_s_per_byte *
                       static_cast<double>(rest(t) * itemsize(spec.dtype)));
      due.push_back(due_s_[at(t)] - now);
    }
    const Batching batching =
        batch_exactly(length, due, params.cost.latency_s(), params.cost.alpha_s);
    for (size_t i = 0, batch = 0; i < left.size(); ++i) {
      const bool first =
          batch < batching.begins.size() && static_cast<int>(i) == batching.begins[batch];
      const TensorSpec& spec = profile_.tensors[at(left[i])];
      if (first) ++batch;
      if (first || layout_.dtype(out.ops.back().blocks.front()) != spec.dtype) {
        out.ops.push_back({{}, params.split});
      }
      add(out.ops.back().blocks, {spec.offset + sent_[at(left[i])], spec.end()}, layout_);
    }
  }

  const Profile& profile_;
  const Plan& layout_;
  const std::vector<double>& due_s_;
  std::vector<int> backward_, by_due_, rank_;
  std::vector<int64_t> sent_;  // elements from the tensor's start
  std::vector<bool> ready_;
};

std::vector<HeuristicParams> heuristic_params(const NetworkModel& network, double total_bytes,
                                              bool sharded) {
  std::vector<HeuristicParams> out;
  size_t windows = std::max<size_t>(network.all_reduce.size(), 2);
  if (network.concurrent > 0) windows = std::min(windows, static_cast<size_t>(network.concurrent));
  // Whenever a rank is late, an op alone in flight leaves the channel idle.
  const size_t fewest = network.concurrent > 1 ? 2 : 1;
  for (bool split : {false, true}) {
    if (sharded && !split) continue;
    const Collective kind = split ? Collective::reduce_scatter : Collective::all_reduce;
    for (size_t k = fewest; k <= windows; ++k) {
      AlphaBeta cost = network.cost(kind, static_cast<int>(k));
      cost.beta_s_per_byte = std::max(cost.beta_s_per_byte, 1e-15);
      // With k in flight, a startup passes while the ops before are on the channel.
      cost.alpha_s /= static_cast<double>(k);
      cost.overlap_s /= static_cast<double>(k);
      for (double least = 0; least < total_bytes;
           least = std::max({4 * least, cost.alpha_s / cost.beta_s_per_byte, 1.0})) {
        out.push_back({static_cast<int>(k), split, cost, least});
        if (cost.alpha_s == 0) break;
      }
    }
  }
  return out;
}

// Ranks that are a little late use up the overlap: where the model credits all of it, small ops
// look free.
NetworkModel cautious(NetworkModel network) {
  for (auto* row : {&network.all_reduce, &network.reduce_scatter, &network.all_gather}) {
    for (AlphaBeta& cost : *row) cost.overlap_s *= kCredited;
  }
  return network;
}

}  // namespace

Plan automatic(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  if (network.topology) return automatic_routed(profile, network, options);
  if (!options.codec_of.empty()) return automatic_coded(profile, network, options);
  return automatic_searched(profile, network, options, {kSearchWork, 2});
}

Plan automatic_searched(const Profile& profile, const NetworkModel& network,
                        const PolicyOptions& options, SearchEffort effort) {
  Simulator simulator(profile, network, options.overlap, options.sharded);
  const Plan usual =
      options.sharded ? dear(profile, network, options) : ddp(profile, network, options);
  if (profile.tensors.empty()) return usual;
  Candidates all;
  const auto consider = [&](Plan plan) {
    const double lateness_s = simulator.lateness_s(plan);
    const auto ops = Candidates::count_ops(plan, network.one_shot);
    all.add(lateness_s, ops, std::move(plan));
  };
  consider(usual);
  // What no plan can improve on.
  const double least_s = simulator.bound_s() * (1 + kRounding) - simulator.iteration_s();
  if (all.least_s() <= least_s) return usual.with_ops("auto", usual.ops());
  for_each_rival(profile, network, options, consider);
  const double others_s = all.least_s();
  const auto chosen = [&] {
    // What is hidden for others may have less time to spare here, but must not come late.
    const Plan& plan = all.choose(std::max(others_s, 0.0), kAlmost * profile.iteration_s());
    return plan.with_ops("auto", plan.ops());
  };
  if (others_s <= least_s) return chosen();

  const NetworkModel assumed = cautious(network);
  const Profile job = profile.tensors.size() > kManyTensors ? coarse(profile, kParts) : profile;
  Simulator searched(job, assumed, options.overlap, options.sharded);
  const Plan layout = wfbp(job, network, options);
  const DraftCosts costs(assumed, searched.due_s());
  struct Found {
    double lateness_s;
    bool split;
    Draft draft;
  };
  std::vector<Found> drafts;
  PlanBuilder builder(job, layout, searched.due_s());
  for (const HeuristicParams& params :
       heuristic_params(assumed, static_cast<double>(profile.bytes()), options.sharded)) {
    Draft draft = builder.draft(params);
    const bool several = params.split && params.in_flight > 1;
    for (bool as_scattered : several ? std::vector{false, true} : std::vector{false}) {
      draft.gathers_as_scattered = as_scattered;
      const Plan plan = build(draft, layout, costs);
      drafts.push_back({searched.lateness_s(plan), params.split, draft});
      consider(usual.with_ops("auto", plan.ops()));
    }
  }
  std::stable_sort(drafts.begin(), drafts.end(),
                   [](const Found& a, const Found& b) { return a.lateness_s < b.lateness_s; });
  std::map<std::pair<int, bool>, int> improved;  // by ops in flight and kind before the search
  for (const Found& found : drafts) improved[{found.draft.in_flight, found.split}] = 0;
  const int64_t work = effort.work / (2 * effort.drafts * std::ssize(improved));
  LocalSearch search(searched, layout, costs, work, searched.bound_s() - searched.iteration_s(),
                     !options.sharded);
  for (auto& [lateness_s, split, draft] : drafts) {
    if (improved[{draft.in_flight, split}]++ >= effort.drafts) continue;
    search.improve(draft);
    search.simplify(draft, kSimpler * profile.iteration_s());
    consider(usual.with_ops("auto", build(draft, layout, costs).ops()));
  }
  return chosen();
}

}  // namespace usbyte
