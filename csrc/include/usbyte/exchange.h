// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

namespace usbyte {

/// Memory of its own, not initialised, on 16 bytes at least.
///
/// Large buffers ask the system for huge pages. It clears and maps fresh memory page by page, and
/// with small pages that takes longer than to fill the buffer with a message.
class Buffer {
 public:
  Buffer() = default;
  /// Throws std::bad_alloc.
  explicit Buffer(int64_t bytes);

  std::byte* data() const { return data_.get(); }
  int64_t size() const { return size_; }  // bytes
  std::span<const std::byte> bytes() const { return {data(), static_cast<size_t>(size_)}; }

 private:
  struct Delete {
    Delete() : Delete(std::align_val_t{16}) {}
    explicit Delete(std::align_val_t a) : alignment(a) {}
    void operator()(std::byte* memory) const { ::operator delete(memory, alignment); }

    std::align_val_t alignment;
  };

  std::unique_ptr<std::byte, Delete> data_;
  int64_t size_ = 0;
};

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
