// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "plan/dimension_path.h"
#include "usbyte/plan.h"

namespace usbyte {

/// The inputs of `op` are gradients, not what another op has reduced.
inline bool takes_gradients(const Op& op) {
  return op.kind != Collective::all_gather && !of_shards(op);
}

/// `op` leaves each rank a shard of its blocks, which another op works on.
inline bool leaves_shards(const Op& op) {
  return op.kind == Collective::reduce_scatter || of_shards(op);
}

/// Which ops wait for which tensors and ops, and which ops bring a tensor. The step, the device's
/// side of it and the planners' simulator share these lists. Does not refer to the plan.
class PlanIndex {
 public:
  explicit PlanIndex(const Plan& plan);

  /// Tensors that `op` touches, ascending.
  std::span<const int> tensors_of(int op) const { return tensors_of_[op]; }
  /// Ops whose inputs include the gradient of `tensor`, ascending.
  std::span<const int> sent_by(int tensor) const { return sent_by_[tensor]; }
  /// Ops after which `tensor` has arrived, ascending.
  std::span<const int> brought_by(int tensor) const {
    return shards_ ? brought_by_[tensor] : sent_by_[tensor];
  }
  /// Ops that leave the shards that `op` works on, ascending. If an op along another dimension has
  /// added shards up, only this op, which waits for the scatter.
  std::span<const int> follows(int op) const {
    return shards_ ? follows_[op] : std::span<const int>();
  }
  /// Ops that work on the shards that `op` leaves, ascending.
  std::span<const int> followers_of(int op) const {
    return shards_ ? followers_of_[op] : std::span<const int>();
  }

 private:
  // Lists one after the other in memory: planners make an index for each plan that they try.
  class Lists {
   public:
    std::span<const int> operator[](int list) const {
      const size_t begin = ends_[static_cast<size_t>(list)];
      return {items_.data() + begin, ends_[static_cast<size_t>(list) + 1] - begin};
    }
    // For each of `count` items, those lists of `of` that hold it, ascending; without lists for
    // which `keeps` is false.
    template <typename Keeps>
    static Lists inverse(const Lists& of, size_t count, const Keeps& keeps);
    // Items of the list that `end_list` ends; may be appended to.
    std::vector<int>& items() { return items_; }
    void end_list() { ends_.push_back(items_.size()); }

   private:
    std::vector<size_t> ends_{0};  // the first one: where the first list begins
    std::vector<int> items_;
  };

  void index_shards(const Plan& plan);

  bool shards_ = false;  // whether there are lists of shards; if not, each op brings what it sends
  Lists tensors_of_, sent_by_, brought_by_, follows_, followers_of_;
};

/// Groups of tensors of which the ops after which a tensor has arrived are a subset of those of
/// another one.
struct CoArriving {
  std::vector<int> group_of;              ///< by tensor
  std::vector<std::vector<int>> tensors;  ///< by group, ascending: they arrive no later
};

/// Which tensors have arrived as soon as one has. Tensors that the same ops bring share a group.
CoArriving co_arriving(const Plan& plan);

}  // namespace usbyte
