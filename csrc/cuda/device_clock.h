// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>

#include "cuda/cuda.h"
#include "event_pool.h"

namespace usbyte {

/// When a device reaches a point of one of its streams, on the host's steady clock. Copies are the
/// same moment.
class Moment {
 public:
  Moment() = default;

  /// The event to record; nobody else may.
  CudaEvent event() const { return event_.get(); }
  explicit operator bool() const { return static_cast<bool>(event_); }

 private:
  friend class DeviceClock;
  struct Anchor;

  PooledEvent event_;
  std::shared_ptr<const Anchor> anchor_;  // older than the event
};

/// Relates a device's time to the host's. Thread-safe.
///
/// Events tell how much later one is than another, in single precision, and clocks drift; so a
/// moment is told from an anchor that is not much older than it: an event on an idle stream, whose
/// time on the host is known to within some ten microseconds.
class DeviceClock {
 public:
  explicit DeviceClock(std::shared_ptr<Cuda> cuda);

  /// A moment whose event is yet to be recorded.
  Moment moment();
  /// Now, on `stream`.
  Moment mark(CudaStream stream);
  bool passed(const Moment& moment) { return cuda_->passed(moment.event()); }
  /// Seconds on the steady clock; blocks the host until the moment has passed.
  double seconds(const Moment& moment);
  /// Seconds from one moment to the other, exact also where both are long after their anchors;
  /// blocks the host until both have passed.
  double between(const Moment& from, const Moment& to);
  /// Takes a new anchor for the moments to come, unless that takes too long to be exact. Blocks the
  /// host for some microseconds, and for well below a millisecond where the device is busy.
  void anchor();

 private:
  const std::shared_ptr<Cuda> cuda_;
  const OwnedStream stream_;  // nothing but anchors is on it
  EventPool events_;
  std::mutex mutex_;  // guards anchor_
  std::shared_ptr<const Moment::Anchor> anchor_;
};

}  // namespace usbyte
