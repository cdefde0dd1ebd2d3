// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cuda/communicators/stream_mesh_communicator.h"
#include "mesh_rig.h"
#include "nccl_rig.h"

namespace usbyte::test {

/// A mesh of emulated devices, over a FakeNccl for all and one for each axis group.
class StreamMeshRig {
 public:
  StreamMeshRig(Topology topology, int slots, FakeNcclOptions fake = {},
                EmulatedCudaOptions emulated = {})
      : topology_(std::move(topology)), rig_(topology_.ranks(), slots, fake, emulated) {
    ids_.resize(topology_.dimensions.size());
    for (auto& of_dimension : ids_) of_dimension.resize(static_cast<size_t>(topology_.ranks()));
    for (int d = 0; d < topology_.ndim(); ++d) {
      for (int rank = 0; rank < topology_.ranks(); ++rank) {
        if (topology_.axis_group(rank, d)[0] != rank) continue;
        std::vector<NcclId>& ids = ids_[static_cast<size_t>(d)][static_cast<size_t>(rank)];
        for (int i = 0; i < kPhasesInFlight; ++i) rig_.nccl().unique_id(&ids.emplace_back());
      }
    }
  }

  const Topology& topology() const { return topology_; }
  NcclRig& rig() { return rig_; }

  /// Runs `body(rank, communicator)` on every rank.
  template <typename Body>
  void on_each(Body body, int slots, const NcclOptions& options = {}) {
    on_each_rank(topology_.ranks(), [&](int rank) {
      FakeNccl::process = rank;
      std::vector<std::shared_ptr<Communicator>> axis_groups;
      std::shared_ptr<Communicator> flat = rig_.make(rank, options);
      for (int d = 0; d < topology_.ndim(); ++d) {
        const std::vector<int> group = topology_.axis_group(rank, d);
        auto& its = axis_groups.emplace_back();
        if (group.size() == 1) continue;
        its = std::make_shared<NcclCommunicator>(
            rig_.shared_nccl(), rig_.shared_device(rank),
            topology_.coordinates(rank)[static_cast<size_t>(d)], static_cast<int>(group.size()),
            ids_[static_cast<size_t>(d)][static_cast<size_t>(group[0])], options);
      }
      StreamMeshCommunicator mesh(topology_, rig_.shared_device(rank), std::move(flat),
                                  std::move(axis_groups), slots);
      body(rank, mesh);
    });
    FakeNccl::process.reset();
  }

 private:
  const Topology topology_;
  NcclRig rig_;
  std::vector<std::vector<std::vector<NcclId>>>
      ids_;  // by dimension, and first rank of the axis group
};

}  // namespace usbyte::test
