// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda.h"
#include "usbyte/communicator.h"
#include "usbyte/topology.h"

namespace usbyte {

/// What MeshCommunicator is for the host, for communicators that are `stream_ordered`: chunks go
/// over the axis groups of a network's dimensions as it says, but all phases of a request are
/// launched at once, ordered by events, and the host waits for none.
///
/// Phases are launched in `launch_order`, for the topology's speeds. Each waits for its chunk's
/// phase before, and starts no sooner than the one launched before it may, on whichever axis group:
/// so as far as events go, communicators that share a device start in one order on all its ranks,
/// and never wait for one another in a circle. (That NCCL's kernels then keep to it takes NCCL 2.26
/// with NCCL_LAUNCH_ORDER_IMPLICIT and a driver of CUDA 12.3; before, they need room side by side.)
/// Requests keep windows and fences as StreamWindow says; the communicators below get none.
///
/// Every request needs an `order`. After an error of an axis group, later requests with a schedule
/// are a FaultError that names the phase, as what was launched of it leaves ranks waiting; `abort`
/// ends that. Any thread may call anything, `abort` also while another is inside `launch`.
class StreamMeshCommunicator final : public Communicator {
 public:
  /// `axis_groups[d]` is of the ranks `topology.axis_group(rank, d)`, in that order; null where
  /// there is one only. At most `slots` requests run side by side. Throws UsageError where ranks or
  /// sizes do not fit the topology, or where a communicator is not `stream_ordered`.
  StreamMeshCommunicator(Topology topology, std::shared_ptr<Cuda> cuda,
                         std::shared_ptr<Communicator> flat,
                         std::vector<std::shared_ptr<Communicator>> axis_groups, int slots);
  ~StreamMeshCommunicator() override;
  StreamMeshCommunicator(const StreamMeshCommunicator&) = delete;
  StreamMeshCommunicator& operator=(const StreamMeshCommunicator&) = delete;

  int rank() const override;
  int size() const override;
  /// Takes what MeshCommunicator does, in device memory.
  void launch(const Request& request, Completion done) override;
  const Topology* topology() const override;
  bool stream_ordered() const override { return true; }
  /// That of the flat communicator, or else of the first axis group that has failed.
  std::string failure() override;
  /// Aborts the flat communicator and the axis groups, all at once, as what is on one may wait for
  /// another.
  void abort() override;

  /// Speeds that have been measured since, for launches from now on; the same ones on all ranks, at
  /// the same place between requests. Throws UsageError unless it is the same mesh otherwise.
  void set_speeds(const Topology& measured);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace usbyte
