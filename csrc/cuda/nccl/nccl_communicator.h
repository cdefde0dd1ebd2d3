// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cuda/nccl/nccl.h"
#include "usbyte/communicator.h"

namespace usbyte {

struct NcclOptions {
  /// For all ranks to come and connect, or to register a buffer.
  double init_timeout_s = 60;
  /// For NCCL to put an operation on its stream. The first ones connect, which waits for all ranks
  /// to launch them, and blocks `launch` meanwhile.
  double launch_timeout_s = 300;
  /// For what is in flight, and for the other ranks, when the communicator is destroyed; then it is
  /// aborted.
  double close_timeout_s = 30;
  NcclConfig limits = {};
  /// Buffers of `allocate` are registered as windows where NCCL has them.
  bool windows = true;
};

/// Collectives on device memory, by NCCL.
///
/// A *slot* is an NCCL communicator and a stream; ops run side by side on different ones. Slots,
/// windows and fences are kept as StreamWindow says, on the device and alike on every rank. An op
/// starts no sooner than the one launched before it may start: communicators that started in
/// different orders on different ranks could wait for one another for good.
///
/// A request's spans are one launch. Shards that are not equal are reduced, or sent, each by a call
/// of its own, which moves no more bytes. A request without an `order` takes its memory as it is
/// when `launch` is called, goes alone and completes when it is over on the device, however long
/// that takes. `scale` takes a floating-point sum.
///
/// Any thread may call anything, `abort` also while another is inside `launch`; NCCL is called by
/// one thread at a time.
class NcclCommunicator final : public Communicator {
 public:
  /// Waits for all ranks, which pass as many ids, the same ones in the same order: one for each
  /// slot. Throws FaultError if they do not come in time or NCCL fails.
  NcclCommunicator(std::shared_ptr<NcclApi> nccl, std::shared_ptr<Cuda> cuda, int rank, int size,
                   const std::vector<NcclId>& ids, const NcclOptions& options = {});
  /// `close`, if it has not been called.
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override;
  int size() const override;
  void launch(const Request& request, Completion done) override;
  bool stream_ordered() const override { return true; }
  std::string failure() override;
  void abort() override;

  /// Waits for what is in flight and for the other ranks' end, unless something has failed; aborts
  /// after `close_timeout_s`. Later launches complete with a FaultError.
  void close();

  /// Device memory that NCCL can work on without copies of its own, where it has such. Only this
  /// communicator's `free` gives it back, after an `abort` too. Throws FaultError.
  void* allocate(size_t bytes);
  void free(void* memory);
  /// Lets NCCL send from the buffer and receive into it without copies, where it can. All ranks
  /// together, as a collective, with buffers of one size that were made in the same way, before
  /// they are used and until `deregister_buffer`. Throws FaultError.
  void register_buffer(void* memory, size_t bytes);
  /// All ranks together, when nothing that uses the buffer is in flight.
  void deregister_buffer(void* memory);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace usbyte
