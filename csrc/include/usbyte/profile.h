#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "usbyte/tensor.h"

namespace usbyte {

/// What the job was measured to do in one iteration without waiting for the network.
///
/// `tensors` are in arena order: one dtype after the other, and by forward order within each. Times
/// are seconds since the forward pass began: `need_s[i]` when the forward pass first uses parameter
/// i, `ready_s[i]` when backward has produced its gradient. `step_s` is the whole iteration, from
/// one forward pass to the next.
struct Profile {
  std::vector<TensorSpec> tensors;
  std::vector<double> need_s;
  std::vector<double> ready_s;
  double step_s = 0;

  /// Throws PlanError unless sizes agree, offsets are contiguous, and times are finite and not
  /// negative.
  void validate() const;
  std::string to_json() const;
  static Profile from_json(std::string_view json);
};

/// Tensor indices in the order in which the forward pass needs them; ties go by index.
std::vector<int> forward_order(const Profile& profile);

/// Tensor indices in the order in which backward produces them; ties go to the later layer first.
std::vector<int> backward_order(const Profile& profile);

}  // namespace usbyte
