// SPDX-License-Identifier: Apache-2.0
#include "launch_queue.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {

LaunchQueue::LaunchQueue(const Plan& plan, std::shared_ptr<const PlanIndex> index,
                         bool hold_gathers, int64_t steps_before)
    : plan_(plan),
      hold_gathers_(hold_gathers),
      step_(plan, std::move(index), hold_gathers),
      oldest_(plan.ops().size()) {
  record_.step = steps_before;
}

void LaunchQueue::check_can_begin() const {
  if (in_backward_ || !step_.drained()) {
    throw UsageError("begin_step: step " + std::to_string(record_.step) + " is not drained");
  }
}

void LaunchQueue::begin_step() {
  in_backward_ = true;
  ready_count_ = 0;
  step_.begin();
  released_ = false;
  oldest_ = 0;
  warned_ = false;
  ++record_.step;
  record_.ready_s.assign(plan_.tensors().size(), 0);
  record_.queued_s.assign(plan_.ops().size(), 0);
  record_.launched_s.assign(plan_.ops().size(), 0);
  record_.done_s.assign(plan_.ops().size(), 0);
  record_.waits.clear();
  record_.updates.clear();
  record_.sparse.clear();
  record_.passes.clear();
}

void LaunchQueue::begin_ready(int tensor) {
  if (!in_backward_) throw UsageError("ready: no backward is open; call begin_step first");
  double& ready_s = record_.ready_s[static_cast<size_t>(tensor)];
  if (ready_s > 0) {
    throw UsageError("the gradient of '" + plan_.tensors()[static_cast<size_t>(tensor)].name +
                     "' became ready twice in one step");
  }
  ready_s = now_s();
}

std::span<const int> LaunchQueue::end_ready(int tensor) {
  ++ready_count_;
  return step_.ready(tensor).queued;
}

void LaunchQueue::end_backward() {
  if (!in_backward_) throw UsageError("end_backward: no backward is open");
  if (ready_count_ != static_cast<int>(plan_.tensors().size())) {
    for (size_t t = 0; t < record_.ready_s.size(); ++t) {
      if (record_.ready_s[t] == 0) {
        throw UsageError("end_backward: the gradient of '" + plan_.tensors()[t].name +
                         "' is not ready");
      }
    }
  }
  in_backward_ = false;
}

void LaunchQueue::begin_release() {
  if (!hold_gathers_) throw UsageError("release_gathers: this engine does not hold gathers back");
  if (released_ || !step_.reduced()) {
    throw UsageError("release_gathers: already released, or not everything is reduced");
  }
  released_ = true;
}

std::span<const int> LaunchQueue::end_release() { return step_.release_gathers().queued; }

std::vector<int> LaunchQueue::unready() const {
  std::vector<int> out;
  for (size_t t = 0; t < record_.ready_s.size(); ++t) {
    if (record_.ready_s[t] == 0) out.push_back(static_cast<int>(t));
  }
  return out;
}

int LaunchQueue::launch() {
  const int op = step_.launch();
  const double now = record_.launched_s[static_cast<size_t>(op)] = now_s();
  flights_.launched(record_.step, op, now);
  return op;
}

std::span<const int> LaunchQueue::complete(int op, double now_s) {
  record_.done_s[static_cast<size_t>(op)] = last_done_s_ = now_s;
  const Step::Change change = step_.complete(op);
  while (oldest_ < step_.launched() && record_.done_s[oldest_] > 0) ++oldest_;
  if (!change.arrived.empty() || step_.reduced()) waiters_pending_ = true;
  return change.queued;
}

std::optional<double> LaunchQueue::waiting_since() const {
  if (step_.in_flight() == 0 || oldest_ >= step_.launched()) return std::nullopt;
  return std::max(record_.launched_s[oldest_], last_done_s_);
}

nlohmann::ordered_json LaunchQueue::flights(double now_s) const {
  return flights_.to_json(plan_, now_s);
}

}  // namespace usbyte
