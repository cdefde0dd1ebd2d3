// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "cuda/kernel_arguments.h"
#include "usbyte/stream.h"

namespace usbyte {

/// What an event is for besides putting streams in order.
enum class EventKind {
  ordering,  ///< nothing
  awaited,   ///< the host, which sleeps while it waits; more than some dozens that have not passed
             ///< make it wait at the next record
  timed,     ///< `elapsed_s`; who waits for it spins, as being woken takes tens of microseconds
};

/// What the library uses of CUDA on one device, so that all logic above it runs without a GPU too.
///
/// Semantics are CUDA's: work on one stream runs in order, work on different streams runs at any
/// time unless an event orders it; `wait` refers to the last `record` before the call, and to
/// nothing if there was none. Nothing here blocks the host but what says so. All methods are
/// thread-safe, and leave the calling thread's current device as it was. They throw FaultError with
/// CUDA's error and the call's name.
///
/// Implementations: `make_cuda` (the runtime), `EmulatedCuda` (threads on host memory).
class Cuda {
 public:
  virtual ~Cuda() = default;

  /// Ordinal of the device.
  virtual int device() const = 0;

  /// A stream that does not synchronise with the legacy default stream.
  virtual CudaStream create_stream(bool high_priority) = 0;
  /// Work that is on it still runs.
  virtual void destroy(CudaStream stream) noexcept = 0;
  /// Blocks the host until all work on the stream is over.
  virtual void synchronize(CudaStream stream) = 0;
  /// True while the stream is captured into a CUDA graph.
  virtual bool capturing(CudaStream stream) = 0;

  virtual CudaEvent create_event(EventKind kind) = 0;
  virtual void destroy(CudaEvent event) noexcept = 0;
  virtual void record(CudaEvent event, CudaStream stream) = 0;
  /// What comes later on `stream` begins once the event has passed.
  virtual void wait(CudaStream stream, CudaEvent event) = 0;
  /// Whether all work before the last record is over; true if there was none.
  virtual bool passed(CudaEvent event) = 0;
  /// Blocks the host until `passed`.
  virtual void synchronize(CudaEvent event) = 0;
  /// Seconds on the device between two timed events that have passed.
  virtual double elapsed_s(CudaEvent from, CudaEvent to) = 0;

  /// Device memory, aligned to 256 bytes at least; may block.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
  /// Page-locked host memory, which copies to and from run beside everything else, and which
  /// kernels reach, too; may block.
  virtual void* allocate_pinned(size_t bytes) = 0;
  virtual void free_pinned(void* memory) noexcept = 0;
  /// Copies between any two of host, pinned and device memory. The host does not wait if the host
  /// side is pinned.
  virtual void copy(void* target, const void* source, size_t bytes, CudaStream stream) = 0;

  // Kernels; see kernel_arguments.h. Arguments are taken before the call returns.

  /// target[i] = scale * source[i] in every segment, converted between the types; one launch for up
  /// to `kSegmentsPerLaunch` segments. Segments' targets must not overlap anything else.
  virtual void copy_segments(std::span<const CopySegment> segments, DType from, DType to,
                             double scale, CudaStream stream) = 0;
  /// `count` elements of `value`.
  virtual void fill(void* target, DType dtype, int64_t count, double value, CudaStream stream) = 0;
  /// target[rows[i]] += values[i], for rows of `width` elements. `rows` must not decrease; equal
  /// ones are added in order, so that the result does not depend on timing.
  virtual void scatter_add(void* target, const int64_t* rows, const void* values, DType dtype,
                           int64_t count, int64_t width, CudaStream stream) = 0;
  /// target[i] = scale * source[positions[i]], for `count` rows of `width` elements, of any type,
  /// with another scale than 1 of a floating-point one; multiplied as by `copy_segments`. The
  /// target overlaps nothing else.
  virtual void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                           int64_t count, int64_t width, double scale, CudaStream stream) = 0;
  /// Groups the first `*count` of `most` ids, or all if `count` is null, by server; both are on the
  /// device. `table` is of `partition.table_size()` elements, which need not be set. No row is
  /// ever lost: those that find no place are counted.
  virtual void partition_rows(const RowPartition& partition, const int64_t* ids,
                              const int64_t* count, int64_t most, int32_t* table,
                              const RowGroups& groups, CudaStream stream) = 0;
  /// Every run's message: of its values, or of those and what is kept, which changes as a codec's
  /// `send` changes it. `dtype` is float32, float16 or bfloat16.
  virtual void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype,
                             CudaStream stream) = 0;
  /// values = what the messages of `ranks` ranks mean together, as a codec's `combine`; each rank's
  /// begins `stride` bytes behind that of the one before.
  virtual void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype,
                             int ranks, int64_t stride, CudaStream stream) = 0;
  /// One SGD step of every parameter.
  virtual void update_sgd(std::span<const SgdTensor> tensors, DType dtype,
                          const SgdOptions& options, CudaStream stream) = 0;
  /// One Adam or AdamW step of every parameter.
  virtual void update_adam(std::span<const AdamTensor> tensors, DType dtype,
                           const AdamOptions& options, CudaStream stream) = 0;

  /// Opens and closes a named range for profilers on the calling thread; no more than a few
  /// nanoseconds where none listens.
  virtual void push_range(const char* name) = 0;
  virtual void pop_range() = 0;
};

/// A stream that goes with this object.
class OwnedStream {
 public:
  OwnedStream(std::shared_ptr<Cuda> cuda, bool high_priority)
      : cuda_(std::move(cuda)), stream_(cuda_->create_stream(high_priority)) {}
  ~OwnedStream() { cuda_->destroy(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  CudaStream get() const { return stream_; }

 private:
  const std::shared_ptr<Cuda> cuda_;
  const CudaStream stream_;
};

/// A named range for profilers, for as long as this object lives. `name` outlives it.
class NamedRange {
 public:
  NamedRange(Cuda& cuda, const std::string& name) : cuda_(cuda) { cuda_.push_range(name.c_str()); }
  ~NamedRange() { cuda_.pop_range(); }
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;

 private:
  Cuda& cuda_;
};

/// The CUDA runtime on `device`. Throws UsageError if this build has no CUDA part or there is no
/// such device, with the remedy.
std::shared_ptr<Cuda> make_cuda(int device);

}  // namespace usbyte
