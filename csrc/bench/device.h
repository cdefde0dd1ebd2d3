// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda/cuda.h"

// What the benchmarks of devices share.
namespace usbyte::bench {

/// Memory of the device, given back at the end.
class Allocation {
 public:
  Allocation(Cuda& cuda, int64_t bytes)
      : cuda_(cuda), memory_(cuda.allocate(static_cast<size_t>(bytes))) {}
  ~Allocation() { cuda_.free(memory_); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(memory_); }

 private:
  Cuda& cuda_;
  void* memory_;
};

/// A stream, and events to time what is on it.
class Stream {
 public:
  explicit Stream(Cuda& cuda) : cuda_(cuda), stream_(cuda.create_stream(false)) {
    for (CudaEvent& e : events_) e = cuda.create_event(EventKind::timed);
  }
  ~Stream() {
    for (CudaEvent e : events_) cuda_.destroy(e);
    cuda_.destroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  operator CudaStream() const { return stream_; }
  void mark(size_t event) { cuda_.record(events_[event], stream_); }
  double between(size_t from, size_t to) { return cuda_.elapsed_s(events_[from], events_[to]); }

 private:
  Cuda& cuda_;
  CudaStream stream_;
  std::array<CudaEvent, 4> events_{};
};

}  // namespace usbyte::bench
