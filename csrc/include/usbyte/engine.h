// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "usbyte/communicator.h"
#include "usbyte/exchange.h"
#include "usbyte/plan.h"
#include "usbyte/sparse.h"
#include "usbyte/stream.h"
#include "usbyte/timeline.h"

namespace usbyte {

class Cuda;
class Moment;

struct EngineOptions {
  double stall_warning_s = 60;
  double stall_limit_s = 300;
  /// Steps that an engine before this one has done; numbering goes on from there.
  int64_t steps_before = 0;
  /// No all_gather is launched before `release_gathers`.
  bool hold_gathers = false;
  /// The device that holds the flat buffer; null if the host does.
  std::shared_ptr<Cuda> device = nullptr;
  /// What sparse gradients travel over; ends with the engine.
  std::shared_ptr<Exchange> exchange = nullptr;
  /// Multiplied with gradients as they are taken into the flat buffer, and with sums of sparse
  /// ones.
  double scale = 1;
  /// The codecs' state, such as error feedback: [most `state_rows` of a codec, plan.numel()]
  /// float32, all zeros at first, on the same device as the flat buffer. Not owned; must outlive
  /// the engine.
  float* codec_state = nullptr;
  /// Of what codecs draw by chance; the same on all ranks.
  uint64_t seed = 0;
  /// On a device, times of tensors and waits too; a timeline has them anyway.
  bool timed = false;
  /// Called on the engine's thread with a line worth logging.
  std::function<void(const std::string&)> on_warning;
  /// Called on the engine's thread when an op has not completed for `stall_warning_s`, with what is
  /// known on this rank; the text returned goes to `on_warning`. It may take time, as the next.
  std::function<std::string(const std::string&)> on_stall;
  /// Called on the engine's thread when communication failed, with what is known on this rank; the
  /// text returned is what every wait throws. It may take time, to ask other ranks.
  std::function<std::string(const std::string&)> on_fault;
};

/// Executes a plan, step after step, in the background.
///
/// One step: `begin_step`, `ready` once for every tensor, `end_backward`; then `wait` for tensors
/// in any order, or `drain`. Ops are launched strictly in plan order, each when all its bytes are
/// ready and its window admits it; an all_gather also waits for the reduce_scatter of its blocks.
/// No op of step k+1 is launched before every op of step k has completed. The thread that reports a
/// completion launches the ops that it unblocks; otherwise the engine's thread does. At most one
/// thread launches at a time. Waiters are notified only after the next op has been launched, so
/// that they do not take the core, or the GIL, from the launching thread.
///
/// On a device, methods do not wait for the device unless they say so. Gradients stay where they
/// are until the last one that an op needs is ready: then one kernel packs them into the
/// flat buffer. Events order the streams: an op runs after its gradients, and later work on a
/// stream that was given to `wait` runs after the op. A wait on the host ends when the op is on a
/// stream or, if the communicator is not `stream_ordered`, when the network has done its part. For
/// a sparse tensor it always ends then, as the host makes the sum.
///
/// A fault ends a stream-ordered collective early, and work on the device that waits for it goes
/// on: updates that were on a stream may have been applied to incomplete sums. The state of the
/// failed step must not be used.
///
/// After a fault every call that begins, feeds or waits for a step throws the same
/// FaultError. All methods are thread-safe.
class Engine {
 public:
  /// Starts the thread; it runs when this returns. `flat_buffer` holds `plan.flat_buffer_bytes()`
  /// bytes and, like `communicator`, outlives the engine.
  Engine(Plan plan, std::byte* flat_buffer, Communicator& communicator, EngineOptions options = {});
  /// Finishes the step if its backward is closed, else stops launching; waits for ops in flight
  /// (unless the engine has failed) and joins the thread.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Plan& plan() const;

  /// Opens the next step. Throws UsageError unless the previous one is drained, and while `stream`
  /// is captured into a CUDA graph. On a device, what comes later on `stream` may write to the
  /// flat buffer.
  void begin_step(CudaStream stream = {});
  /// The gradient of `tensor` is at `gradient`, on a device after the work that is on `stream` now,
  /// or in the flat buffer if null, on the host scaled already. Returns the tensors of a device
  /// that have been packed, whose own memory later work on `stream` may use again; on the host the
  /// flat buffer has it when this returns. Throws UsageError if it was already ready in this step.
  std::vector<int> ready(int tensor, CudaStream stream = {}, const void* gradient = nullptr);
  /// The gradient of a sparse tensor, whose memory must live until the tensor has arrived. On a
  /// device it is device memory, as is `count`. After the work that is on `stream` now, the first
  /// `*count` rows, or all if `count` is null, are there; none of them twice, or the rounding of
  /// their sum is left to chance. Throws UsageError for other tensors, as `ready`
  /// does for sparse ones.
  void ready_rows(int tensor, RowsView rows, CudaStream stream = {},
                  const int64_t* count = nullptr);
  /// The sum of a sparse tensor's gradients, which has been waited for; on the host. Throws
  /// UsageError when it has been taken in this step.
  SparseSum take_rows(int tensor);
  /// Tensors that are not ready yet in this step.
  std::vector<int> unready() const;
  /// Closes backward. Throws UsageError if a tensor is not ready: the caller marks unused ones as
  /// zeros first.
  void end_backward();

  /// Waits until `tensor` has arrived in the step that was begun last; at once if there was none.
  /// `poll` is called about ten times a second meanwhile, without any lock; what it throws ends the
  /// wait. On a device, here and below, later work on `stream` comes after what is waited for.
  void wait(int tensor, const std::function<void()>& poll = {}, CudaStream stream = {});
  /// Waits until every all_reduce and reduce_scatter of the current step has completed: each rank's
  /// shards then hold sums over the ranks.
  void wait_reduced(const std::function<void()>& poll = {}, CudaStream stream = {});
  /// The shards hold what the all_gathers shall send, on a device after the work that is on
  /// `stream` now. Once in a step; throws UsageError if they are not held or not everything is
  /// reduced.
  void release_gathers(CudaStream stream = {});
  /// Waits until every op of the current step has completed.
  void drain(const std::function<void()>& poll = {}, CudaStream stream = {});

  /// Ends the engine with this message, as a fault that another rank has found.
  void fail(const std::string& message);
  /// A function that does the same without owning the engine, for threads that the engine's
  /// destructor waits for, such as its callbacks. The destructor waits for running calls; a later
  /// call does nothing.
  std::function<void(const std::string&)> fail_callback() const;
  /// Empty while all is well.
  std::string fault() const;

  /// Steps begun so far.
  int64_t steps() const;
  /// For other ranks, as JSON: step, phase ("idle", "backward", "flight"), ops launched and
  /// completed, up to four tensors whose gradients are awaited, awaits_release, if this
  /// host waits for nothing but `release_gathers`, open_step, of the oldest op that a
  /// device was not seen to be through with (before a fault) or 0, and the last ops: of each the
  /// step, what it is, launched_s ago, and took_s, null while in flight.
  std::string status() const;
  /// When each tensor became ready in the current step, seconds on the steady clock; 0 where it has
  /// not. On a device those are its own times, for which the host waits, and with `timed` only.
  std::vector<double> ready_times() const;
  /// When each op of the current step was launched and completed, likewise; on a device to be asked
  /// for when the step is drained.
  std::vector<std::pair<double, double>> op_times() const;

  /// Records from the next step on, into each of `writers`; writes out what is complete. Without
  /// any, it records no more. Between two steps, nothing is lost for a writer that stays.
  void set_timelines(std::vector<std::shared_ptr<TimelineWriter>> writers);
  /// Adds the time a layer's update took to the timeline. `tensors` name it.
  void record_update(const std::vector<int>& tensors, double start_s, double end_s);
  /// The same on a device.
  void record_update(const std::vector<int>& tensors, const Moment& start, const Moment& end);
  /// Adds a "forward" or "backward" pass of the current step to the timeline; it may have begun
  /// before the step did.
  void record_pass(const std::string& name, double start_s, double end_s);
  /// The same on a device.
  void record_pass(const std::string& name, const Moment& start, const Moment& end);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace usbyte
