// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cuda/cuda.h"

namespace usbyte {

struct EmulatedCudaOptions {
  /// Every piece of work on a created stream is put off by a random time up to this, in seconds.
  double most_delay_s = 0;
  uint64_t seed = 1;
};

/// CUDA's order of streams and events, on threads of this process and host memory: what is not
/// ordered by an event runs at the same time, late, and in any order. For tests, under
/// ThreadSanitizer too, of everything above `Cuda`. Kernels are those of the device, run on the
/// host.
///
/// Stream 0 is the calling thread itself: work on it is done when the call returns, and a wait on
/// it blocks the caller. Tensors on the host can so stand for those on a device: copies are late
/// whatever memory they are of, also where CUDA would have read pageable memory before it returned.
/// What is wrong with a call that cannot throw, or goes wrong in work on a stream, `poison`s.
class EmulatedCuda : public Cuda {
 public:
  /// Puts `work` on the stream, as a kernel of the caller's; it must not call this object.
  virtual void enqueue(CudaStream stream, std::function<void()> work) = 0;
  /// Puts a kernel on the stream that takes that many seconds, more than any random delay.
  virtual void delay(CudaStream stream, double seconds) = 0;
  /// Lets `capturing(stream)` answer so from now on. What is given to the stream runs all the same,
  /// but the host cannot ask for events that are recorded meanwhile.
  virtual void set_capturing(CudaStream stream, bool capturing) = 0;
  /// How often the host has waited for work that was not over: synchronize, of any kind.
  virtual int64_t host_waits() const = 0;
  /// Streams, events and allocations that were made and not given back.
  virtual int64_t live() const = 0;
  /// From now on every call throws FaultError with this text, as after a sticky CUDA error.
  virtual void poison(const std::string& error) = 0;
};

std::shared_ptr<EmulatedCuda> make_emulated_cuda(EmulatedCudaOptions options = {});

}  // namespace usbyte
