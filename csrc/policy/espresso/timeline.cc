// SPDX-License-Identifier: Apache-2.0
#include "timeline.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kCompute = static_cast<size_t>(Resource::compute);

std::vector<const TaskChain*> pointers(const std::vector<TaskChain>& chains) {
  std::vector<const TaskChain*> out;
  for (const TaskChain& chain : chains) out.push_back(&chain);
  return out;
}

std::vector<TaskChain> chains_of(const CompressionJob& job, const CompressionCluster& cluster,
                                 std::span<const Strategy> strategies) {
  if (strategies.size() != job.tensors.size()) {
    throw UsageError(std::to_string(strategies.size()) + " strategies for " +
                     std::to_string(job.tensors.size()) + " tensors");
  }
  std::vector<TaskChain> out;
  for (size_t t = 0; t < strategies.size(); ++t) {
    const CompressionJob::Tensor& tensor = job.tensors[t];
    const std::optional<TaskChain> chain = TaskChainBuilder(cluster, tensor).make(strategies[t]);
    if (!chain) {
      throw UsageError("strategy '" + strategies[t].describe() + "' is none for " +
                       std::string(name(tensor.dtype)) + " with codec '" + tensor.codec + "' on " +
                       std::to_string(cluster.nodes) + " nodes of " +
                       std::to_string(cluster.ranks_per_node) + " ranks");
    }
    out.push_back(*chain);
  }
  return out;
}

}  // namespace

CompressionTimeline::CompressionTimeline(const CompressionJob& job,
                                         std::vector<const TaskChain*> chains)
    : job_(&job), chains_(std::move(chains)), checkpoints_(job.tensors.size()) {
  const size_t count = job.tensors.size();
  double before_s = 0;
  for (const CompressionJob::Tensor& tensor : job.tensors) {
    if (!(tensor.ready_s >= before_s)) {
      throw UsageError("compression job: tensors must be in the order in which they are ready");
    }
    backward_s_.push_back(tensor.ready_s - before_s);
    before_s = tensor.ready_s;
  }
  backward_after_s_.resize(count);
  double after_s = job.rest_s;
  for (size_t i = count; i-- > 0;) {
    backward_after_s_[i] = after_s;
    after_s += backward_s_[i];
  }
  for (size_t r = 0; r < kResources; ++r) {
    const size_t most = count * kMostStages + (r == kCompute ? count : 0);
    queues_[r].entries.resize(most);
    trial_[r].entries.resize(most);
  }
  to_come_s_.resize(count + 1);
  least_rest_s_.assign(count + 1, kInfinity);
  for (size_t i = count; i-- > 0;) {
    least_rest_s_[i] = std::min(least_rest_s_[i + 1], job.tensors[i].rest_s);
  }
  iteration_s_ = job.rest_s;
  if (count > 0) {
    sum_up(static_cast<int>(count) - 1);
    commit(-1);
  }
}

void CompressionTimeline::sum_up(int last) {
  for (size_t i = static_cast<size_t>(last) + 1; i-- > 0;) {
    to_come_s_[i] = to_come_s_[i + 1];
    const TaskChain& chain = *chains_[i];
    for (size_t s = 0; s < static_cast<size_t>(chain.count); ++s) {
      to_come_s_[i][chain.resource[s]] += chain.seconds[s];
    }
  }
}

double CompressionTimeline::simulate(Queues& queues, int from, double longest_s, double limit_s,
                                     bool record) {
  const int count = static_cast<int>(chains_.size());
  int64_t tasks = 0;
  bool too_long = false;
  const auto serve = [&](size_t r, double now_s, double seconds, Entry entry, double after_s) {
    Queue& queue = queues[r];
    entry.end_s = std::max(now_s, queue.free_s) + seconds;
    queue.free_s = entry.end_s;
    queue.entries[queue.tail++] = entry;
    too_long |= entry.end_s + after_s >= limit_s;
    ++tasks;
  };
  const auto serve_stage = [&](int t, int stage, double now_s) {
    const TaskChain& chain = *chains_[static_cast<size_t>(t)];
    if (stage == chain.count) {
      longest_s = std::max(longest_s, now_s + job_->tensors[static_cast<size_t>(t)].rest_s);
      return;
    }
    const auto s = static_cast<size_t>(stage);
    serve(chain.resource[s], now_s, chain.seconds[s], {0, t, stage},
          chain.after_s[s] + job_->tensors[static_cast<size_t>(t)].rest_s);
  };
  const auto serve_backward = [&](int t, double now_s) {
    if (t == count) {
      longest_s = std::max(longest_s, now_s + job_->rest_s);
      return;
    }
    const auto i = static_cast<size_t>(t);
    serve(kCompute, now_s, backward_s_[i], {0, t, kBackward}, backward_after_s_[i]);
  };
  // At one time, the codec of a tensor comes before what backward does next.
  const auto produced = [&](int t, double now_s) {
    serve_stage(t, 0, now_s);
    serve_backward(t + 1, now_s);
    const auto next = static_cast<size_t>(t) + 1;
    if (t + 1 < bounded_from_ || t + 1 >= count) return;
    for (size_t r = 0; r < kResources; ++r) {
      double least_s = queues[r].free_s + to_come_s_[next][r] + least_rest_s_[next];
      if (r == kCompute) least_s += backward_after_s_[next] - job_->rest_s;
      too_long |= to_come_s_[next][r] > 0 && least_s >= limit_s;
    }
  };
  if (from < 0) {
    serve_backward(0, 0);
  } else {
    produced(from, queues[kCompute].entries[queues[kCompute].head - 1].end_s);
  }
  while (!too_long) {
    size_t next = kResources;
    double now_s = kInfinity;
    int tensor = 0;
    for (size_t r = 0; r < kResources; ++r) {
      const Queue& queue = queues[r];
      if (queue.head == queue.tail) continue;
      const Entry& first = queue.entries[queue.head];
      if (first.end_s < now_s || (first.end_s == now_s && first.tensor < tensor)) {
        next = r;
        now_s = first.end_s;
        tensor = first.tensor;
      }
    }
    if (next == kResources) break;
    const Entry entry = queues[next].entries[queues[next].head++];
    if (entry.stage != kBackward) {
      serve_stage(entry.tensor, entry.stage + 1, now_s);
      continue;
    }
    if (record) {
      Checkpoint& checkpoint = checkpoints_[static_cast<size_t>(entry.tensor)];
      checkpoint.longest_s = longest_s;
      for (size_t r = 0; r < kResources; ++r) {
        checkpoint.marks[r] = {queues[r].head, queues[r].tail, queues[r].free_s};
      }
    }
    produced(entry.tensor, now_s);
  }
  tasks_ += tasks;
  return too_long ? kInfinity : longest_s;
}

void CompressionTimeline::commit(int from) {
  double longest_s = 0;
  if (from >= 0) {
    const Checkpoint& checkpoint = checkpoints_[static_cast<size_t>(from)];
    longest_s = checkpoint.longest_s;
    for (size_t r = 0; r < kResources; ++r) {
      const Mark& mark = checkpoint.marks[r];
      queues_[r].head = mark.head;
      queues_[r].tail = mark.tail;
      queues_[r].free_s = mark.free_s;
    }
  }
  iteration_s_ = simulate(queues_, from, longest_s, kInfinity, true);
}

double CompressionTimeline::tentatively(int first_changed, int last_changed, double limit_s) {
  const Checkpoint& checkpoint = checkpoints_[static_cast<size_t>(first_changed)];
  if (checkpoint.longest_s >= limit_s) return kInfinity;
  for (size_t r = 0; r < kResources; ++r) {
    const Mark& mark = checkpoint.marks[r];
    // That which backward has just done is looked at once more.
    const size_t begin = mark.head - (r == kCompute ? 1 : 0);
    const auto first = queues_[r].entries.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = queues_[r].entries.begin() + static_cast<std::ptrdiff_t>(mark.tail);
    std::copy(first, last, trial_[r].entries.begin());
    trial_[r].head = mark.head - begin;
    trial_[r].tail = mark.tail - begin;
    trial_[r].free_s = mark.free_s;
  }
  bounded_from_ = last_changed + 1;
  return simulate(trial_, first_changed, checkpoint.longest_s, limit_s, false);
}

double CompressionTimeline::iteration_with(int tensor, const TaskChain& chain, double limit_s) {
  const TaskChain*& held = chains_[static_cast<size_t>(tensor)];
  const TaskChain* const before = std::exchange(held, &chain);
  const double out = tentatively(tensor, tensor, limit_s);
  held = before;
  return out;
}

double CompressionTimeline::iteration_with(const std::vector<int>& tensors,
                                           const std::vector<const TaskChain*>& chains,
                                           double limit_s) {
  if (tensors.empty()) return iteration_s_ < limit_s ? iteration_s_ : kInfinity;
  std::vector<const TaskChain*> before;
  before.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    before.push_back(std::exchange(chains_[static_cast<size_t>(tensors[i])], chains[i]));
  }
  const auto [first, last] = std::minmax_element(tensors.begin(), tensors.end());
  const double out = tentatively(*first, *last, limit_s);
  for (size_t i = 0; i < tensors.size(); ++i) {
    chains_[static_cast<size_t>(tensors[i])] = before[i];
  }
  return out;
}

void CompressionTimeline::set(int tensor, const TaskChain& chain) {
  chains_[static_cast<size_t>(tensor)] = &chain;
  sum_up(tensor);
  commit(tensor);
}

int CompressionTimeline::after_last_bubble() const {
  for (size_t i = checkpoints_.size(); i-- > 0;) {
    const auto& marks = checkpoints_[i].marks;
    if (std::all_of(marks.begin(), marks.end(), [](const Mark& m) { return m.head == m.tail; })) {
      return static_cast<int>(i);
    }
  }
  return 0;
}

std::vector<ScheduledStage> CompressionTimeline::starts() const {
  std::vector<ScheduledStage> out;
  for (const Queue& queue : queues_) {
    double free_s = 0;  // rounded, a stage that takes next to nothing would begin after the next
    for (size_t i = 0; i < queue.tail; ++i) {
      const Entry& entry = queue.entries[i];
      const double before_s = std::exchange(free_s, entry.end_s);
      if (entry.stage == kBackward) continue;
      const double seconds = chain(entry.tensor).seconds[static_cast<size_t>(entry.stage)];
      out.push_back({entry.tensor, entry.stage, std::max(entry.end_s - seconds, before_s)});
    }
  }
  return out;
}

double iteration_s(const CompressionJob& job, const CompressionCluster& cluster,
                   std::span<const Strategy> strategies) {
  const std::vector<TaskChain> chains = chains_of(job, cluster, strategies);
  return CompressionTimeline(job, pointers(chains)).iteration_s();
}

std::vector<ScheduledStage> schedule(const CompressionJob& job, const CompressionCluster& cluster,
                                     std::span<const Strategy> strategies) {
  const std::vector<TaskChain> chains = chains_of(job, cluster, strategies);
  std::vector<ScheduledStage> out = CompressionTimeline(job, pointers(chains)).starts();
  std::erase_if(out, [&](const ScheduledStage& stage) {
    const StageKind kind =
        strategies[static_cast<size_t>(stage.tensor)].stages[static_cast<size_t>(stage.stage)].kind;
    return kind == StageKind::encode || kind == StageKind::decode;
  });
  std::sort(out.begin(), out.end(), [](const ScheduledStage& a, const ScheduledStage& b) {
    return std::tuple(a.start_s, a.tensor, a.stage) < std::tuple(b.start_s, b.tensor, b.stage);
  });
  return out;
}

}  // namespace usbyte
