#pragma once

#include <memory>
#include <vector>

#include "usbyte/communicator.h"
#include "usbyte/topology.h"

namespace usbyte {

/// Collectives on a network of several dimensions: an all_reduce with a schedule goes in chunks,
/// each of which is scattered, summed up, over the lines of one dimension after another, in the
/// order of its route, and gathered over them backwards. While one chunk is on the lines of one
/// dimension, others are on those of others. What has no schedule goes to the flat communicator.
///
/// Chunk k of c is the k-th `shard` of each span among c; what a rank has after a phase is its
/// shard, by its coordinate, of what it had before. Sums of an element are made by one rank for
/// each line, and are the same to the bit on all ranks.
///
/// A line's communicator gets the phases in the schedule's order, those of one request behind those
/// of the one before, at most two at a time. So all ranks of a line agree on what is next, and as
/// the schedule has no circle, nothing waits for ever. That order is lost with the first error:
/// every request with a schedule that is not complete, and every later one, then completes with it,
/// once nothing of it is in flight.
class MeshCommunicator final : public Communicator {
 public:
  /// `lines[d]` is of the ranks `topology.line(rank, d)`, in that order; null where there is one
  /// only. Throws UsageError where ranks or sizes do not fit the topology.
  MeshCommunicator(Topology topology, std::shared_ptr<Communicator> flat,
                   std::vector<std::shared_ptr<Communicator>> lines);
  /// Waits until nothing is in flight.
  ~MeshCommunicator() override;
  MeshCommunicator(const MeshCommunicator&) = delete;
  MeshCommunicator& operator=(const MeshCommunicator&) = delete;

  int rank() const override;
  int size() const override;
  /// A request with a schedule is an all_reduce of sums on the host, without a scale.
  void launch(const Request& request, Completion done) override;
  void abort() override;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace usbyte
