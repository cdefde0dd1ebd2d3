// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "cluster.h"
#include "strategy.h"
#include "task_chain.h"

namespace usbyte {

/// F(S): seconds of an iteration in which each tensor takes its strategy. The compute stream, the
/// CPU threads and the two links each serve one task after the other, in order of arrival and, at
/// one time, of backward. A codec on the GPU delays what backward does next. Decoding n messages
/// takes n times as long as one; encoding for an all_to_all counts as one message, as in the paper,
/// where the engine encodes each shard. Throws UsageError on a strategy that the cluster or the
/// tensor's codec does not admit.
double iteration_s(const CompressionJob& job, const CompressionCluster& cluster,
                   std::span<const Strategy> strategies);

/// When each collective of each tensor would be started, by the same timeline.
struct ScheduledStage {
  int tensor;  ///< of the job
  int stage;   ///< of its strategy
  double start_s;
};
/// All collectives by start; equal ones in order of backward.
std::vector<ScheduledStage> schedule(const CompressionJob& job, const CompressionCluster& cluster,
                                     std::span<const Strategy> strategies);

/// F(S), kept for the strategies that tensors have now, so that a change of one tensor's is
/// simulated only from where backward has produced that tensor.
///
/// Each resource serves in order of arrival, so what it has begun ends in that order too: the next
/// thing to happen is the first entry of one of four queues.
class CompressionTimeline {
 public:
  /// Chains are looked at as long as they are set. `job` outlives this.
  CompressionTimeline(const CompressionJob& job, std::vector<const TaskChain*> chains);

  /// As the tensors are now.
  double iteration_s() const { return iteration_s_; }
  const TaskChain& chain(int tensor) const { return *chains_[static_cast<size_t>(tensor)]; }
  /// The same if `tensor` had `chain`; infinite if that is not below `limit_s`.
  double iteration_with(int tensor, const TaskChain& chain, double limit_s);
  /// The same if each of `tensors` had the chain at its place.
  double iteration_with(const std::vector<int>& tensors,
                        const std::vector<const TaskChain*>& chains, double limit_s);
  void set(int tensor, const TaskChain& chain);

  /// The tensors before this one have arrived before it is ready, and nothing else goes on then.
  int after_last_bubble() const;
  /// Tasks simulated so far.
  int64_t tasks() const { return tasks_; }
  /// When each task of the tensors as they are now begins, by arrival at the resource.
  std::vector<ScheduledStage> starts() const;

 private:
  static constexpr int kBackward = -1;  // stage of what backward does to produce a tensor

  struct Entry {
    double end_s;
    int tensor, stage;
  };
  struct Queue {
    std::vector<Entry> entries;
    size_t head = 0, tail = 0;  // of those that have begun and not ended
    double free_s = 0;
  };
  using Queues = std::array<Queue, kResources>;
  // Of a queue when backward has just produced a tensor.
  struct Mark {
    size_t head, tail;
    double free_s;
  };
  struct Checkpoint {
    std::array<Mark, kResources> marks{};
    double longest_s = 0;
  };

  double simulate(Queues& queues, int from, double longest_s, double limit_s, bool record);
  double tentatively(int first_changed, int last_changed, double limit_s);
  void commit(int from);
  void sum_up(int last);

  const CompressionJob* job_;
  std::vector<const TaskChain*> chains_;
  std::vector<double> backward_s_;        // of what produces each tensor
  std::vector<double> backward_after_s_;  // what the iteration takes at least after that
  // What tensors from each on, not counting backward, take of each resource, and the least that
  // the iteration takes after one of them has arrived: a bound that ends hopeless trials early.
  std::vector<std::array<double, kResources>> to_come_s_;
  std::vector<double> least_rest_s_;
  int bounded_from_ = 0;  // the tensors of a trial that differ are before this one
  Queues queues_, trial_;
  std::vector<Checkpoint> checkpoints_;
  double iteration_s_ = 0;
  int64_t tasks_ = 0;
};

}  // namespace usbyte
