// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "options.h"
#include "task_chain.h"
#include "timeline.h"

namespace usbyte {

/// A choice for all tensors, by tensor an index of its options, that takes about as much of each
/// resource, whatever the order: local optimum of the sum of loads^exponent, from `choice` on.
/// `scale_s` is about what the largest load is; `exponent` a power of two.
std::vector<int> balanced_choice(const CompressionJob& job, const StrategyTable& options,
                                 std::vector<int> choice, double scale_s, int exponent);

/// Strategies of all tensors while they are searched for.
class StrategySearch {
 public:
  /// Begins with `choice`, by tensor an index of its options; ends after about `work` tasks.
  StrategySearch(const CompressionJob& job, const StrategyTable& options, std::vector<int> choice,
                 int64_t work);

  /// Algorithm 1.
  void greedy();
  /// Algorithm 2.
  void offload();
  /// Each tensor in turn takes the best of all its options, until nothing changes.
  void descend();
  /// The same by pairs of tensors that backward produces shortly after one another. Returns whether
  /// anything changed.
  bool descend_pairs();

  double iteration_s() const { return timeline_.iteration_s(); }
  /// What it would be with that choice.
  double iteration_s(const std::vector<int>& choice);
  const std::vector<int>& choice() const { return choice_; }
  int64_t tasks() const { return timeline_.tasks(); }
  bool exhausted() const { return timeline_.tasks() >= work_; }

 private:
  // Tensors with options in common that have chosen the same one, in order of backward.
  struct Group {
    const TaskChain* on_cpu;
    int on_cpu_index;
    std::vector<int> tensors;
  };

  const TaskChain& chain(int tensor, int option) const {
    return options_->of(tensor).all[static_cast<size_t>(option)];
  }
  bool improve(int tensor, const std::vector<int>& candidates);
  bool improve_pair(int first, int second);
  bool moves_nothing(int tensor) const;
  std::vector<Group> groups() const;
  double with_offloaded(const std::vector<Group>& groups, const std::vector<int>& counts,
                        double limit_s);
  std::vector<int> best_of_all(const std::vector<Group>& groups);
  std::vector<int> best_in_turns(const std::vector<Group>& groups);

  const CompressionJob* job_;
  const StrategyTable* options_;
  std::vector<int> choice_;
  std::vector<int> order_;  // by size descending, of one size the last one in backward first
  CompressionTimeline timeline_;
  int64_t work_;
};

}  // namespace usbyte
