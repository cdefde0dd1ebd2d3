// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "usbyte/policy.h"

namespace usbyte {

/// A job whose tensors are sent unit by unit. Indices are the profile's.
struct UnitJob {
  UnitJob(const Profile& profile, const NetworkModel& network, const PolicyOptions& options);

  const Profile* profile;
  AlphaBeta cost;  ///< of an all_reduce that is alone
  std::vector<int> backward, forward;
  std::vector<double> due_s;
  std::vector<int64_t> bytes, unit_bytes;  ///< by tensor; a unit is whole elements
};

/// Bytes [begin, end) of one tensor.
struct TensorSlice {
  int tensor;
  int64_t begin, end;

  int64_t bytes() const { return end - begin; }
};

/// The all_reduce of `slice`.
Op all_reduce(const UnitJob& job, TensorSlice slice, int64_t window_bytes, bool fence);

/// What is left of the gradients that are ready, by priority.
class Backlog {
 public:
  /// `order` holds every tensor, the one that goes first at its front.
  Backlog(const UnitJob& job, std::span<const int> order);

  void ready(int tensor);
  bool empty() const { return ready_.empty(); }
  /// The tensor that goes first.
  int first() const { return order_[static_cast<size_t>(ready_.front())]; }
  int64_t rest(int tensor) const {
    const size_t t = static_cast<size_t>(tensor);
    return job_->bytes[t] - sent_[t];
  }
  /// Takes `bytes` of the first tensor, rounded up to whole units; at least one unit, and no more
  /// than is left.
  TensorSlice take(double bytes);

 private:
  const UnitJob* job_;
  std::span<const int> order_;
  std::vector<int> rank_;      // by tensor: its place in `order_`
  std::vector<int> ready_;     // a heap of places, the first on top
  std::vector<int64_t> sent_;  // by tensor
};

}  // namespace usbyte
