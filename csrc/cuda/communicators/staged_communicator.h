// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/cuda.h"
#include "usbyte/communicator.h"

namespace usbyte {

struct StagedOptions {
  /// Size of a host buffer, and of the messages that requests are cut into. The same on every rank.
  int64_t chunk_bytes = 4 << 20;
  /// Host buffers, two at least: while one is on the network, others are copied to and from.
  int buffers = 4;
};

/// Collectives on device memory by way of page-locked host memory and a communicator of the host,
/// where ranks share a device or there is no NCCL.
///
/// A request goes in chunks: out of the device on one stream, over the network, into it on another,
/// each chunk while others are at other stages. Its spans are on the device; `order->started` is
/// recorded before the first copy out, `order->done` behind the last copy in, and with that it is
/// complete. Without an `order`, it begins at once and is complete when the memory holds the
/// result. For all_to_all, `send` and `recv` are the same memory or do not overlap.
///
/// Chunks reach `inner` in the order of launches, the same on every rank, from a thread of this
/// object. That order is lost with the first error of `inner` or the device: every request that is
/// not complete, and every later one, then completes with an error. Copies of these may go on until
/// this object is destroyed.
class StagedCommunicator final : public Communicator {
 public:
  /// Throws UsageError if an option is out of range, FaultError if the device refuses.
  StagedCommunicator(std::shared_ptr<Cuda> cuda, std::shared_ptr<Communicator> inner,
                     StagedOptions options = {});
  /// Requests that are not complete complete with an error first. Waits for copies, for a second at
  /// most as what they come behind may hang, but not for `inner`, which may complete what it has at
  /// any time later.
  ~StagedCommunicator() override;
  StagedCommunicator(const StagedCommunicator&) = delete;
  StagedCommunicator& operator=(const StagedCommunicator&) = delete;

  int rank() const override;
  int size() const override;
  /// That of `inner`, along whose dimensions requests may go, and through which they may be routed.
  const Topology* topology() const override;
  void launch(const Request& request, Completion done) override;
  /// Requests that are not complete complete with an error; afterwards their memory is not touched,
  /// unless a copy of it hangs for longer than a second.
  void abort() override;

 private:
  struct State;
  // What `inner` has in flight shares the state, so the state does not own `inner`.
  const std::shared_ptr<Communicator> inner_;
  std::shared_ptr<State> state_;
};

}  // namespace usbyte
