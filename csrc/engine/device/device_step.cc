// SPDX-License-Identifier: Apache-2.0
#include "device_step.h"

#include <algorithm>
#include <iterator>

#include "plan/plan_index.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

bool passed(DeviceClock& clock, const Moment& moment) { return !moment || clock.passed(moment); }

double seconds(DeviceClock& clock, const Moment& moment) {
  return moment ? clock.seconds(moment) : 0;
}

std::vector<double> seconds(DeviceClock& clock, const std::vector<Moment>& moments) {
  std::vector<double> out;
  for (const Moment& moment : moments) out.push_back(seconds(clock, moment));
  return out;
}

}  // namespace

bool DeviceRecord::passed(DeviceClock& clock) const {
  const auto over = [&](const Moment& moment) { return usbyte::passed(clock, moment); };
  const auto both_over = [&](const auto& entry) {
    return over(entry.second.first) && over(entry.second.second);
  };
  return std::ranges::all_of(done, over) && std::ranges::all_of(ready, over) &&
         std::ranges::all_of(waits, both_over) && std::ranges::all_of(updates, both_over) &&
         std::ranges::all_of(passes, both_over);
}

StepRecord DeviceRecord::resolve(DeviceClock& clock) const {
  StepRecord out{step,
                 seconds(clock, ready),
                 seconds(clock, queued),
                 seconds(clock, launched),
                 seconds(clock, done),
                 {},
                 {},
                 sparse};
  for (size_t op = 0; op < out.queued_s.size(); ++op) {
    if (!queued[op]) out.queued_s[op] = out.launched_s[op];  // of what another op has left
  }
  for (const auto& [tensor, span] : waits) {
    out.waits.push_back({tensor, {seconds(clock, span.first), seconds(clock, span.second)}});
  }
  for (const auto& [tensors, span] : updates) {
    out.updates.push_back({tensors, {seconds(clock, span.first), seconds(clock, span.second)}});
  }
  for (const auto& [name, span] : passes) {
    out.passes.push_back({name, {seconds(clock, span.first), seconds(clock, span.second)}});
  }
  return out;
}

DeviceStep::DeviceStep(const Plan& plan, std::shared_ptr<const PlanIndex> index,
                       std::byte* flat_buffer, std::shared_ptr<Cuda> cuda, double scale,
                       bool hold_gathers)
    : plan_(plan),
      index_(std::move(index)),
      flat_buffer_(flat_buffer),
      cuda_(std::move(cuda)),
      scale_(scale),
      hold_gathers_(hold_gathers),
      clock_(cuda_),
      events_(cuda_),
      waited_(plan.ops().size()) {
  for (size_t i = 0; i < plan.ops().size(); ++i) {
    labels_.push_back(plan.describe(static_cast<int>(i)));
    all_ops_.push_back(static_cast<int>(i));
    if (plan.ops()[i].kind != Collective::all_gather) reductions_.push_back(static_cast<int>(i));
  }
  record_.done.resize(plan.ops().size());
  coded_.resize(plan.ops().size());
}

void DeviceStep::begin(CudaStream stream, bool timed) {
  MutexLock packing(packing_);
  wait_ops(all_ops_, stream);
  const size_t tensors = plan_.tensors().size(), ops = plan_.ops().size();
  first_stream_ = stream;
  begun_ = {};
  gradients_.assign(tensors, {});
  packed_on_.assign(ops, {});
  missing_.clear();
  for (int op : all_ops_) {
    const bool sends = takes_gradients(plan_.ops()[static_cast<size_t>(op)]);
    missing_.push_back(sends ? static_cast<int>(index_->tensors_of(op).size()) : 0);
  }
  MutexLock lock(mutex_);
  timed_ = timed;
  released_ = {};
  for (auto& streams : waited_) streams.clear();
  record_ = {};
  record_.ready.resize(tensors);
  record_.queued.resize(ops);
  record_.launched.resize(ops);
  record_.done.resize(ops);
}

std::vector<int> DeviceStep::gradient(int tensor, CudaStream stream, const void* source) {
  const auto t = static_cast<size_t>(tensor);
  MutexLock packing(packing_);
  if (stream != first_stream_ && !begun_) {
    begun_ = events_.acquire(EventKind::ordering);
    cuda_->record(begun_.get(), first_stream_);
  }
  gradients_[t] = {source, stream};
  if (timed()) {
    Moment ready = clock_.mark(stream);
    MutexLock lock(mutex_);
    record_.ready[t] = std::move(ready);
  }
  std::vector<int> packed;
  for (int op : index_->sent_by(tensor)) {
    if (--missing_[static_cast<size_t>(op)] == 0) complete(op, stream, packed);
  }
  if (index_->sent_by(tensor).empty()) packed.push_back(tensor);  // it has no elements
  return packed;
}

// Everything that `op` sends is behind what is on `stream` when this returns.
void DeviceStep::complete(int op, CudaStream stream, std::vector<int>& packed) {
  const auto i = static_cast<size_t>(op);
  const NamedRange shown = range(op);
  if (stream != first_stream_) cuda_->wait(stream, begun_.get());
  std::vector<CudaStream> followed{stream};
  std::vector<CopySegment> segments;
  for (int tensor : index_->tensors_of(op)) {
    Gradient& gradient = gradients_[static_cast<size_t>(tensor)];
    const bool mine = gradient.packed_for < 0;
    const CudaStream other =
        mine ? gradient.stream : packed_on_[static_cast<size_t>(gradient.packed_for)];
    if (std::ranges::find(followed, other) == followed.end()) {
      follow(stream, other);
      followed.push_back(other);
    }
    if (!mine) continue;
    const TensorSpec& spec = plan_.tensors()[static_cast<size_t>(tensor)];
    if (spec.sparse()) continue;
    gradient.packed_for = op;
    packed.push_back(tensor);
    std::byte* const target = flat_buffer_ + plan_.byte_offset(spec.offset);
    const void* const source = gradient.source ? gradient.source : target;
    if (source != target || scale_ != 1) segments.push_back({source, target, spec.numel});
  }
  packed_on_[i] = stream;
  if (!segments.empty()) {
    const DType dtype = plan_.dtype(plan_.ops()[i].blocks.front());
    cuda_->copy_segments(segments, dtype, dtype, scale_, stream);
  }
  Moment queued = clock_.mark(stream);
  MutexLock lock(mutex_);
  record_.queued[i] = std::move(queued);
}

bool DeviceStep::timed() const {
  MutexLock lock(mutex_);
  return timed_;
}

void DeviceStep::follow(CudaStream stream, CudaStream other) {
  const PooledEvent event = events_.acquire(EventKind::ordering);
  cuda_->record(event.get(), other);
  cuda_->wait(stream, event.get());
}

void DeviceStep::release(CudaStream stream) {
  PooledEvent released = events_.acquire(EventKind::ordering);
  cuda_->record(released.get(), stream);
  MutexLock lock(mutex_);
  released_ = std::move(released);
}

StreamOrder DeviceStep::order(int op) {
  const auto i = static_cast<size_t>(op);
  MutexLock lock(mutex_);
  StreamOrder out;
  if (takes_gradients(plan_.ops()[i])) out.after.push_back(record_.queued[i].event());
  for (int s : index_->follows(op)) {
    out.after.push_back(record_.done[static_cast<size_t>(s)].event());
  }
  if (hold_gathers_ && released_) out.after.push_back(released_.get());
  if (coded(i)) {
    coded_[i] = {clock_.moment(), clock_.moment(), clock_.moment()};
    out.started = coded_[i].launched.event();
    out.done = coded_[i].received.event();
    return out;
  }
  record_.launched[i] = clock_.moment();
  record_.done[i] = clock_.moment();
  out.started = record_.launched[i].event();
  out.done = record_.done[i].event();
  return out;
}

CudaEvent DeviceStep::done(int op) const {
  MutexLock lock(mutex_);
  return coded_[static_cast<size_t>(op)].done.event();
}

void DeviceStep::received(int op) {
  const auto i = static_cast<size_t>(op);
  MutexLock lock(mutex_);
  record_.launched[i] = coded_[i].launched;
  record_.done[i] = coded_[i].done;
}

LaunchedOp DeviceStep::launched(int op, int64_t step) const {
  const auto i = static_cast<size_t>(op);
  MutexLock lock(mutex_);
  if (coded(i)) return {op, step, coded_[i].launched, coded_[i].received};
  return {op, step, record_.launched[i], record_.done[i]};
}

Moment DeviceStep::begin_wait(CudaStream stream) {
  if (!timed() || cuda_->capturing(stream)) return {};  // events of a capture have no time
  return clock_.mark(stream);
}

void DeviceStep::wait(int tensor, CudaStream stream, const Moment& began) {
  const NamedRange shown(*cuda_, plan_.tensors()[static_cast<size_t>(tensor)].name);
  wait_ops(index_->brought_by(tensor), stream);
  record_wait(tensor, stream, began);
}

void DeviceStep::wait_reduced(CudaStream stream, const Moment& began) {
  if (wait_ops(reductions_, stream)) record_wait(StepRecord::kEveryTensor, stream, began);
}

void DeviceStep::wait_all(CudaStream stream, const Moment& began) {
  if (wait_ops(all_ops_, stream)) record_wait(StepRecord::kEveryTensor, stream, began);
}

void DeviceStep::record_wait(int tensor, CudaStream stream, const Moment& began) {
  if (!began) return;
  Moment through = clock_.mark(stream);
  MutexLock lock(mutex_);
  record_.waits.push_back({tensor, {began, std::move(through)}});
}

bool DeviceStep::wait_ops(std::span<const int> ops, CudaStream stream) {
  std::vector<std::pair<size_t, Moment>> due;
  {
    MutexLock lock(mutex_);
    for (int op : ops) {
      const auto i = static_cast<size_t>(op);
      const bool waited = std::ranges::find(waited_[i], stream) != waited_[i].end();
      if (record_.done[i] && !waited) due.emplace_back(i, record_.done[i]);
    }
  }
  if (due.empty()) return false;
  check_not_captured(stream);
  for (const auto& [op, done] : due) cuda_->wait(stream, done.event());
  MutexLock lock(mutex_);
  for (const auto& [op, done] : due) {
    // Another step may have begun meanwhile.
    const Moment& now = record_.done[op];
    if (now && now.event() == done.event()) waited_[op].push_back(stream);
  }
  return true;
}

void DeviceStep::check_not_captured(CudaStream stream) {
  if (!cuda_->capturing(stream)) return;
  throw UsageError(
      "a training step is being captured into a CUDA graph, which would not replay the "
      "communication of a DistributedOptimizer: do not capture backward() and step()");
}

std::vector<Moment> DeviceStep::ends() const {
  MutexLock lock(mutex_);
  std::vector<Moment> out;
  for (const auto* moments : {&record_.queued, &record_.done}) {
    std::ranges::copy_if(*moments, std::back_inserter(out), [](const Moment& m) { return !!m; });
  }
  return out;
}

void DeviceStep::synchronize() {
  for (const Moment& moment : ends()) cuda_->synchronize(moment.event());
}

bool DeviceStep::ends_within(double seconds) {
  const double deadline_s = now_s() + seconds;
  return std::ranges::all_of(ends(), [&](const Moment& moment) {
    return passes_within(*cuda_, moment.event(), deadline_s - now_s());
  });
}

void DeviceStep::updated(std::vector<int> tensors, Moment start, Moment end) {
  MutexLock lock(mutex_);
  if (timed_) record_.updates.push_back({std::move(tensors), {std::move(start), std::move(end)}});
}

void DeviceStep::add_pass(std::string name, Moment start, Moment end) {
  MutexLock lock(mutex_);
  if (timed_) record_.passes.push_back({std::move(name), {std::move(start), std::move(end)}});
}

DeviceRecord DeviceStep::record() const {
  MutexLock lock(mutex_);
  return record_;
}

}  // namespace usbyte
