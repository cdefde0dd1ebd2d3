#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "bytecomp.h"
#include "task_chain.h"

namespace usbyte {

/// F(S), kept for the strategies that tensors have now, so that a change of one tensor's is
/// simulated only from where backward has produced that tensor.
///
/// Each resource serves in order of arrival, so what it has begun ends in that order too: the next
/// thing to happen is the first entry of one of four queues.
class CompressionTimeline {
 public:
  /// Chains are looked at as long as they are set. `job` outlives this.
  CompressionTimeline(const CompressionJob& job, std::vector<const Chain*> chains);

  /// As the tensors are now.
  double iteration_s() const { return iteration_s_; }
  const Chain& chain(int tensor) const { return *chains_[static_cast<size_t>(tensor)]; }
  /// The same if `tensor` had `chain`; infinite if that is not below `limit_s`.
  double with(int tensor, const Chain& chain, double limit_s);
  /// The same if each of `tensors` had the chain at its place.
  double with(const std::vector<int>& tensors, const std::vector<const Chain*>& chains,
              double limit_s);
  void set(int tensor, const Chain& chain);

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
  std::vector<const Chain*> chains_;
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
