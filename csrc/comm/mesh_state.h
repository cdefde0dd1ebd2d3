// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mesh_communicator.h"
#include "mesh_request.h"
#include "support/thread_annotations.h"

namespace usbyte {

// `mutex` guards what says so and what requests count, and is never held while a communicator or a
// completion is called or destroyed. What is in flight holds the state alive.
//
// Who is inside a communicator has a share of it and is in `inside`. Communicators are let go of
// once nobody else is there, so that no completion of one axis group is left with the last share of
// another: the ends of two axis groups would wait for one another's completions.
//
// Of an axis group one thread at a time launches, which has set `launching`, and one calls
// completions, which has set `delivering`; each of them looks again before it stops. Others leave
// what they have found to it, also when they are further up on its stack, which is thus never
// deeper than there are axis groups.
struct MeshCommunicator::State : std::enable_shared_from_this<State> {
  using Threads = std::vector<std::thread::id>;
  using Requests = std::deque<std::shared_ptr<MeshRequest>>;
  struct Task {
    std::shared_ptr<MeshRequest> mesh_request;  // in `open` or `over`, too, while this waits
    int chunk;
    int phase;
  };
  struct AxisGroup {
    std::shared_ptr<Communicator> communicator;
    std::deque<Task> waiting;  // none after a fault
    int in_flight = 0;
    bool launching = false;
  };

  Mutex mutex;

  State(Topology topology, std::shared_ptr<Communicator> flat,
        std::vector<std::shared_ptr<Communicator>> axis_groups);

  void enter() USBYTE_REQUIRES(mutex) { inside.push_back(std::this_thread::get_id()); }
  void leave() USBYTE_REQUIRES(mutex);
  std::string invalid(const std::shared_ptr<const MeshSchedule>& schedule);
  void launch_flat(const Request& request, Completion done);
  void start(const std::shared_ptr<MeshRequest>& mesh_request);
  void go_on();
  bool launch_on(size_t d);
  void count(size_t d, const Task& task, const std::exception_ptr& error);
  void pass(const Task& task) USBYTE_REQUIRES(mutex);
  void give_up() USBYTE_REQUIRES(mutex);
  void deliver();
  void end(const std::string& why);
  std::string failure();
  bool completing() const USBYTE_REQUIRES(mutex);
  bool idle() const USBYTE_REQUIRES(mutex);

  const Topology topology;
  const int rank;
  const std::vector<int> coordinates;
  const size_t ndim;  // of `axis_groups`

  ConditionVariable changed;  // for ends
  // Null, and those of axis groups, once they are let go of.
  std::shared_ptr<Communicator> flat USBYTE_GUARDED_BY(mutex);
  int flat_in_flight USBYTE_GUARDED_BY(mutex) = 0;
  std::vector<AxisGroup> axis_groups USBYTE_GUARDED_BY(mutex);  // by dimension
  Requests open USBYTE_GUARDED_BY(mutex);                       // not over, in order of launches
  Requests over USBYTE_GUARDED_BY(mutex);                       // to be completed
  bool delivering USBYTE_GUARDED_BY(mutex) = false;
  Threads inside USBYTE_GUARDED_BY(mutex);  // a communicator
  Threads calling
      USBYTE_GUARDED_BY(mutex);  // a completion; while `delivering`, or `flat_in_flight`
  std::string fault USBYTE_GUARDED_BY(mutex);  // final: why requests with a schedule fail
  std::string ended USBYTE_GUARDED_BY(mutex);  // final: why all do
  // Found valid. A schedule is another if its owner is.
  std::map<const MeshSchedule*, std::weak_ptr<const MeshSchedule>> valid USBYTE_GUARDED_BY(mutex);
};

}  // namespace usbyte
