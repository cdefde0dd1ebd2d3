#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "usbyte/buffer.h"

namespace usbyte {

/// A message to another rank and one from it, each as long as the two of them know. An empty one
/// does not travel.
struct Leg {
  int peer = 0;
  std::span<const std::byte> send;
  std::span<std::byte> receive;
};

/// Messages among ranks that keep step: algorithms whose messages depend on the data are written on
/// it, where a `Communicator` has collectives of sizes that a plan knows.
///
/// Used by one thread at a time. What rank a sends to rank b in its n-th message to it is what b
/// receives in its n-th from a.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Sends and receives all of it; blocks until what was sent may be overwritten and what was to
  /// come is there. No peer twice, and not this rank. Throws FaultError when a peer is lost or
  /// after `abort`.
  virtual void transfer(std::span<const Leg> legs) = 0;
  /// Ends what is on its way, and what is to come, with a FaultError; from any thread.
  virtual void abort() = 0;
};

/// A message to another rank, of any length.
struct Outgoing {
  int peer = 0;
  std::span<const std::byte> message;
};

/// Sends to each peer, which does the same with this rank, and returns what they sent, in the order
/// of `outgoing`. Lengths travel first.
std::vector<Buffer> swap(Exchange& exchange, std::span<const Outgoing> outgoing);

/// Ranks that are threads of this process. One whose rank is gone is lost for the others.
std::vector<std::unique_ptr<Exchange>> make_local_exchanges(int size);

}  // namespace usbyte
