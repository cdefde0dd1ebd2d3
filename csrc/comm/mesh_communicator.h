// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "usbyte/communicator.h"
#include "usbyte/topology.h"

namespace usbyte {

/// Collectives on a network of several dimensions: an all_reduce with a schedule goes in chunks,
/// each of which is scattered, summed up, over the axis groups of one dimension after another, in
/// the order of its route, and gathered over them backwards. While one chunk is on the axis groups
/// of one dimension, others are on those of others. A request with a dimension goes over its axis
/// group there, in its turn among phases. What has neither goes to the flat communicator.
///
/// Chunk k of c is the k-th `shard` of each span among c; what a rank has after a phase is its
/// shard, by its coordinate, of what it had before. Sums of an element are made by one rank of each
/// axis group, and are the same to the bit on all ranks.
///
/// An axis group's communicator gets the phases in the schedule's order, those of one request
/// behind those of the one before, at most two at a time. So all ranks of an axis group agree on
/// what is next, and as the schedule has no circle, nothing waits for ever. All ranks must launch
/// the same schedules.
///
/// That order is lost with the first error of an axis group: every request with a schedule that is
/// not complete, once nothing of it is in flight, and every later one then completes with a
/// FaultError that names the phase. Ranks of other axis groups learn of it when this communicator
/// is aborted or gone. Requests with neither a schedule nor a dimension go on.
///
/// Completions of requests with a schedule are called one at a time, by whichever thread completes
/// a phase or launches.
class MeshCommunicator final : public Communicator {
 public:
  /// `axis_groups[d]` is of the ranks `topology.axis_group(rank, d)`, in that order; null where
  /// there is one only. Throws UsageError where ranks or sizes do not fit the topology, or where
  /// requests of the flat communicator or an axis group are complete when they are on a stream.
  MeshCommunicator(Topology topology, std::shared_ptr<Communicator> flat,
                   std::vector<std::shared_ptr<Communicator>> axis_groups);
  /// `abort`, if it has not been called; then waits for what is in flight, and for completions that
  /// are running, so that nothing of this rank is touched or called afterwards. Inside one of its
  /// completions it does not wait: what is outstanding fails right after that.
  ~MeshCommunicator() override;
  MeshCommunicator(const MeshCommunicator&) = delete;
  MeshCommunicator& operator=(const MeshCommunicator&) = delete;

  int rank() const override;
  int size() const override;
  /// A request with a schedule is an all_reduce of sums on the host, without a scale; one with a
  /// dimension an all_reduce, reduce_scatter or all_gather, and likewise.
  void launch(const Request& request, Completion done) override;
  const Topology* topology() const override;
  std::string failure() override;
  /// Aborts the flat communicator and the axis groups and lets go of them, which ends what they
  /// have in flight unless others hold them too; that then completes when they complete it.
  /// Everything outstanding completes with a FaultError, and so does what is launched later, at
  /// once.
  void abort() override;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace usbyte
