// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda.h"
#include "cuda/device_clock.h"
#include "support/thread_annotations.h"
#include "usbyte/communicator.h"
#include "usbyte/plan.h"
#include "usbyte/step_record.h"

namespace usbyte {

class PlanIndex;

/// The moments of one step on a device; those that have no event yet are empty.
struct DeviceRecord {
  int64_t step = 0;
  std::vector<Moment> ready;                                     // by tensor
  std::vector<Moment> queued, launched, done;                    // by op
  std::vector<std::pair<int, std::pair<Moment, Moment>>> waits;  // by tensor, or kEveryTensor
  std::vector<std::pair<std::vector<int>, std::pair<Moment, Moment>>> updates;
  std::map<int, SparseTraffic> sparse;                                    // by op
  std::vector<std::pair<std::string, std::pair<Moment, Moment>>> passes;  // by name

  /// Everything that was recorded has passed.
  bool passed(DeviceClock& clock) const;
  /// Times on the steady clock; blocks the host until all have passed.
  StepRecord resolve(DeviceClock& clock) const;
};

/// An op that is on a stream.
struct LaunchedOp {
  int op;
  int64_t step;
  Moment started, done;
};

/// The device's side of a step: gradients are packed into the flat buffer, and events put streams
/// and ops in order. Nothing blocks the host but what says so.
///
/// The engine calls `order` on the thread that launches and everything else on its callers'. A call
/// of CUDA may block once a device has much to do, for ever if that hangs; so `mutex_`, which
/// `order` needs, is not held across one but to make events.
class DeviceStep {
 public:
  /// `plan` outlives it; `index` is of `plan`. Gradients are multiplied with `scale`. With
  /// `hold_gathers`, all_gathers wait for `release`.
  DeviceStep(const Plan& plan, std::shared_ptr<const PlanIndex> index, std::byte* flat_buffer,
             std::shared_ptr<Cuda> cuda, double scale, bool hold_gathers);

  /// Throws UsageError if the stream is being captured.
  void check_not_captured(CudaStream stream);
  /// The next step: what comes later on `stream` may write to the flat buffer. With `timed`,
  /// tensors, waits and updates are in the record, too.
  void begin(CudaStream stream, bool timed);
  /// The gradient of `tensor` is what `source` holds behind what is on `stream` now; it may be in
  /// the flat buffer already, and is not there if `source` is null. The last gradient that an op
  /// waits for packs, on its stream, all that the op touches and that have not been. Returns the
  /// tensors packed: later work on `stream` may use their memory again. Rows are not packed.
  std::vector<int> gradient(int tensor, CudaStream stream, const void* source);
  /// What the all_gathers send is there behind what is on `stream` now.
  void release(CudaStream stream);
  /// While it lives, profilers show what this thread does as `op`'s.
  NamedRange range(int op) const { return {*cuda_, labels_[static_cast<size_t>(op)]}; }
  /// For `op`, whose inputs are there: for the network, or, if it has a codec, for its messages on
  /// the network. Its events are this object's until the next `begin`.
  StreamOrder order(int op);
  /// To be recorded when the flat buffer holds what `op`, which has a codec and an order, has
  /// brought.
  CudaEvent done(int op) const;
  /// The messages of `op`, which has a codec, are on their stream: it is in the record from now on.
  void received(int op);

  /// An op that has been launched, for whoever watches it.
  LaunchedOp launched(int op, int64_t step) const;

  /// When the device comes to a wait on `stream`, for the record; empty if that has no such times.
  Moment begin_wait(CudaStream stream);
  /// Later work on `stream` comes after the ops that bring `tensor`, which have been launched;
  /// after every reduction; after all ops. The record gets the wait with the time at which it
  /// `began`. Throws UsageError if the stream is being captured and would have to wait.
  void wait(int tensor, CudaStream stream, const Moment& began);
  void wait_reduced(CudaStream stream, const Moment& began);
  void wait_all(CudaStream stream, const Moment& began);
  /// Blocks the host until all that was packed is, and all ops that were launched are over.
  void synchronize();
  /// The same, for so many seconds at most. Returns whether it is.
  bool ends_within(double seconds);

  /// Adds an update to the record.
  void updated(std::vector<int> tensors, Moment start, Moment end);
  /// Adds a forward or backward pass to the record.
  void add_pass(std::string name, Moment start, Moment end);
  DeviceRecord record() const;
  DeviceClock& clock() { return clock_; }

 private:
  Mutex packing_;  // taken before `mutex_`
  mutable Mutex mutex_;

  void complete(int op, CudaStream stream, std::vector<int>& packed) USBYTE_REQUIRES(packing_);
  void follow(CudaStream stream, CudaStream other);
  /// Returns whether the stream has not waited for all of them before.
  bool wait_ops(std::span<const int> ops, CudaStream stream);
  void record_wait(int tensor, CudaStream stream, const Moment& began);
  bool timed() const;
  std::vector<Moment> ends() const;
  bool coded(size_t op) const { return plan_.ops()[op].codec != "none"; }

  const Plan& plan_;
  const std::shared_ptr<const PlanIndex> index_;
  std::byte* const flat_buffer_;
  const std::shared_ptr<Cuda> cuda_;
  const double scale_;
  const bool hold_gathers_;
  std::vector<std::string> labels_;  // by op

  DeviceClock clock_;
  EventPool events_;
  std::vector<int> all_ops_, reductions_;

  struct Gradient {
    const void* source = nullptr;
    CudaStream stream;
    int packed_for = -1;  // the op
  };
  struct Coded {
    Moment launched, received, done;
  };

  CudaStream first_stream_ USBYTE_GUARDED_BY(packing_);
  // Behind the last step's ops, on first_stream_.
  PooledEvent begun_ USBYTE_GUARDED_BY(packing_);
  std::vector<Gradient> gradients_ USBYTE_GUARDED_BY(packing_);    // by tensor
  std::vector<int> missing_ USBYTE_GUARDED_BY(packing_);           // by op: gradients
  std::vector<CudaStream> packed_on_ USBYTE_GUARDED_BY(packing_);  // by op

  bool timed_ USBYTE_GUARDED_BY(mutex_) = false;
  // By op: streams that are behind it.
  std::vector<std::vector<CudaStream>> waited_ USBYTE_GUARDED_BY(mutex_);
  PooledEvent released_ USBYTE_GUARDED_BY(mutex_);
  std::vector<Coded> coded_ USBYTE_GUARDED_BY(mutex_);  // by op with a codec
  DeviceRecord record_ USBYTE_GUARDED_BY(mutex_);
};

}  // namespace usbyte
