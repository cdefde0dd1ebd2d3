// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/nccl/nccl_communicator.h"
#include "fake_nccl.h"
#include "ranks.h"

namespace usbyte::test {

/// Emulated devices, a FakeNccl among them, and the ids of `slots` slots. Checks at its end that
/// nothing was misused or left.
class NcclRig {
 public:
  NcclRig(int size, int slots, FakeNcclOptions fake = {}, EmulatedCudaOptions emulated = {})
      : cuda_(make_emulated_cuda(emulated)), size_(size) {
    std::vector<TracedCuda*> devices;
    for (int r = 0; r < size; ++r) {
      devices.push_back(devices_.emplace_back(std::make_shared<TracedCuda>(cuda_)).get());
    }
    nccl_ = std::make_shared<FakeNccl>(devices, fake);
    for (int i = 0; i < slots; ++i) nccl_->unique_id(&ids_.emplace_back());
  }
  ~NcclRig() {
    EXPECT_EQ(nccl_->violations(), std::vector<std::string>{});
    EXPECT_EQ(nccl_->live(), 0);
    EXPECT_EQ(cuda_->live(), 0);
  }

  int size() const { return size_; }
  FakeNccl& nccl() { return *nccl_; }
  std::shared_ptr<NcclApi> shared_nccl() { return nccl_; }
  EmulatedCuda& cuda() { return *cuda_; }
  TracedCuda& device(int rank) { return *devices_[static_cast<size_t>(rank)]; }
  std::shared_ptr<Cuda> shared_device(int rank) { return devices_[static_cast<size_t>(rank)]; }
  std::unique_ptr<NcclCommunicator> make(int rank, const NcclOptions& options = {}) {
    return std::make_unique<NcclCommunicator>(nccl_, devices_[static_cast<size_t>(rank)], rank,
                                              size_, ids_, options);
  }
  /// Runs `body(rank, communicator)` on every rank.
  template <typename Body>
  void on_each(Body body, const NcclOptions& options = {}) {
    on_each_rank(size_, [&](int rank) {
      const auto communicator = make(rank, options);
      body(rank, *communicator);
    });
  }

 private:
  std::shared_ptr<FakeNccl> nccl_;
  const std::shared_ptr<EmulatedCuda> cuda_;
  const int size_;
  std::vector<std::shared_ptr<TracedCuda>> devices_;
  std::vector<NcclId> ids_;
};

/// Events of one request.
class OrderEvents {
 public:
  OrderEvents(Cuda& cuda, std::vector<CudaEvent> after)
      : cuda_(cuda),
        order_{std::move(after), cuda.create_event(EventKind::timed),
               cuda.create_event(EventKind::timed)} {}
  ~OrderEvents() {
    cuda_.destroy(order_.started);
    cuda_.destroy(order_.done);
  }
  OrderEvents(const OrderEvents&) = delete;
  OrderEvents& operator=(const OrderEvents&) = delete;

  const StreamOrder& order() const { return order_; }

 private:
  Cuda& cuda_;
  StreamOrder order_;
};

}  // namespace usbyte::test
