// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/tensor.h"

namespace usbyte {

/// What the job was measured to do in one iteration without waiting for the network.
///
/// `tensors` are in flat buffer order: one dtype after the other, and by forward order within each.
/// Times are seconds since the forward pass began: `need_s[i]` when the forward pass first uses
/// parameter i, `ready_s[i]` when backward has produced its gradient. `step_s` is the whole
/// iteration, from one forward pass to the next; `update_s` is the part of it in which the
/// optimizer updates all parameters, after backward. Spreads are half of the range from the 10th to
/// the 90th percentile of what was measured; empty where it is not known.
struct Profile {
  std::vector<TensorSpec> tensors;
  std::vector<double> need_s;
  std::vector<double> ready_s;
  double step_s = 0;
  double update_s = 0;
  std::string model = {};
  std::vector<double> need_spread_s = {};
  std::vector<double> ready_spread_s = {};

  /// When backward ends: the last gradient is ready.
  double backward_end_s() const;
  /// The whole iteration; where `step_s` was not measured, it ends with backward.
  double iteration_s() const { return step_s > 0 ? step_s : backward_end_s() + update_s; }
  int64_t bytes() const;

  /// Throws PlanError unless sizes agree, offsets are contiguous, and times are finite, not
  /// negative and inside the iteration.
  void validate() const;
  std::string to_json() const;
  static Profile from_json(std::string_view json);
};

/// What communication can hide behind: backward alone, as with DDP, or also the next forward pass.
enum class Overlap : uint8_t { backward, forward };

std::string_view name(Overlap overlap);
/// Inverse of `name`; throws UsageError on an unknown spelling.
Overlap overlap_from_name(std::string_view name);

/// By tensor, the latest arrival of its reduced gradient that delays nothing, in seconds since the
/// forward pass began: an iteration takes `iteration_s()` plus the largest lateness.
///
/// Backward: when backward ends. Forward: when the next forward pass needs the parameter; the
/// updates then run in the forward pass, each taking a share of `update_s` by its bytes, and what
/// is needed at one time is updated once all of it is there.
std::vector<double> due_times(const Profile& profile, Overlap overlap);

/// Tensor indices in the order in which the forward pass needs them; ties go by index.
std::vector<int> forward_order(const Profile& profile);

/// Tensor indices in the order in which backward produces them; ties go to the later layer first.
std::vector<int> backward_order(const Profile& profile);

}  // namespace usbyte
