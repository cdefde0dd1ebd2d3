#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "usbyte/communicator.h"
#include "usbyte/plan.h"
#include "usbyte/timeline.h"

namespace usbyte {

struct EngineOptions {
  double stall_warning_s = 60;
  double stall_limit_s = 300;
  /// Steps that an engine before this one has done; numbering goes on from there.
  int64_t steps_before = 0;
  /// No all_gather is launched before `release_gathers`.
  bool hold_gathers = false;
  /// Called on the engine's thread with a line worth logging.
  std::function<void(const std::string&)> on_warning;
  /// Called on the engine's thread when communication failed, with what is known on this rank; the
  /// text returned is what every wait throws. It may take time, to ask other ranks.
  std::function<std::string(const std::string&)> on_fault;
};

/// Executes a plan, step after step, in the background.
///
/// One step: `begin_step`, `ready` once for every tensor, `end_backward`; then `wait` for tensors
/// in any order, or `drain`. Ops are launched strictly in plan order, each when all its bytes are
/// ready and its window admits it; an all_gather also waits for the reduce_scatter of its blocks.
/// No op of step k+1 is launched before every op of step k has completed. What an op's end makes
/// launchable is launched by the thread that reports it, else by the background thread; launches
/// never overlap. Who waits for the op is woken once the communicator has launched, and packed, the
/// next; earlier if another op ends first.
///
/// After a fault every call that begins, feeds or waits for a step throws the same
/// FaultError. All methods are thread-safe.
class Engine {
 public:
  /// Starts the thread; it runs when this returns. `arena` holds `plan.arena_bytes()` bytes and,
  /// like `communicator`, outlives the engine.
  Engine(Plan plan, std::byte* arena, Communicator& communicator, EngineOptions options = {});
  /// Finishes the step if its backward is closed, else stops launching; waits for ops in flight
  /// (unless the engine has failed) and joins the thread.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Plan& plan() const;

  /// Opens the next step. Throws UsageError unless the previous one is drained.
  void begin_step();
  /// The gradient of `tensor` lies in the arena. Throws UsageError if it was already ready in this
  /// step.
  void ready(int tensor);
  /// Tensors that are not ready yet in this step.
  std::vector<int> unready() const;
  /// Closes backward. Throws UsageError if a tensor is not ready: the caller marks unused ones as
  /// zeros first.
  void end_backward();

  /// Waits until `tensor` has arrived in the step that was begun last; at once if there was none.
  /// `poll` is called about ten times a second meanwhile, without any lock; what it throws ends the
  /// wait.
  void wait(int tensor, const std::function<void()>& poll = {});
  /// Waits until every all_reduce and reduce_scatter of the current step has completed: each rank's
  /// shards then hold sums over the ranks.
  void wait_reduced(const std::function<void()>& poll = {});
  /// The shards hold what the all_gathers shall send. Once in a step; throws UsageError if they are
  /// not held or not everything is reduced.
  void release_gathers();
  /// Waits until every op of the current step has completed.
  void drain(const std::function<void()>& poll = {});

  /// Ends the engine with this message, as a fault that another rank has found.
  void fail(const std::string& message);
  /// Empty while all is well.
  std::string fault() const;

  /// Steps begun so far.
  int64_t steps() const;
  /// For other ranks, as JSON: step, phase ("idle", "backward", "flight"), ops launched and
  /// completed, and up to four tensors whose gradients are awaited.
  std::string status() const;
  /// When each tensor became ready in the current step, seconds on the steady clock; 0 where it has
  /// not.
  std::vector<double> ready_times() const;
  /// When each op of the current step was launched and completed, seconds on the steady clock; 0
  /// where it has not.
  std::vector<std::pair<double, double>> op_times() const;

  /// Records from the next step on; nullptr stops and writes out what is complete.
  void set_timeline(std::shared_ptr<TimelineWriter> writer);
  /// Adds the time a layer's update took to the timeline. `tensors` name it.
  void record_update(const std::vector<int>& tensors, double start_s, double end_s);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace usbyte
