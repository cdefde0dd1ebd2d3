// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "cuda/emulation/emulated_cuda.h"

namespace usbyte::test {

/// What has to be so when an op begins, whatever the timing.
struct Begin {
  int op = 0;
  std::set<int> over;     ///< ops that are over
  std::set<int> started;  ///< ops that may have begun: all that they had to wait for has come
};

/// Passes everything on, and works out what the calls order: each op is traced by `run`, which a
/// test's own kernels go through. Independent of timing, so that a wait that is missing shows at
/// every run.
class TracedCuda : public Cuda {
 public:
  explicit TracedCuda(std::shared_ptr<EmulatedCuda> inner) : inner_(std::move(inner)) {}

  /// Puts the work of op number `op` on the stream.
  void run(CudaStream stream, int op, std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      Point& at = streams_[stream];
      begins_.push_back({op, at.over, at.started});
      // What was recorded since the last wait passes as the op begins.
      for (CudaEvent event : at.marks) events_[event].started.insert(op);
      at.marks.clear();
      at.over.insert(op);
      at.started.insert(op);
    }
    inner_->enqueue(stream, std::move(work));
  }
  std::vector<Begin> begins() const {
    std::lock_guard lock(mutex_);
    return begins_;
  }
  EmulatedCuda& inner() { return *inner_; }

  void record(CudaEvent event, CudaStream stream) override {
    std::lock_guard lock(mutex_);
    Point& at = streams_[stream];
    events_[event] = {at.over, at.started, {}};
    for (auto& [other, point] : streams_) std::erase(point.marks, event);
    at.marks.push_back(event);
    inner_->record(event, stream);
  }
  void wait(CudaStream stream, CudaEvent event) override {
    std::lock_guard lock(mutex_);
    Point& at = streams_[stream];
    at.over.insert(events_[event].over.begin(), events_[event].over.end());
    at.started.insert(events_[event].started.begin(), events_[event].started.end());
    at.marks.clear();
    inner_->wait(stream, event);
  }

  int device() const override { return inner_->device(); }
  CudaStream create_stream(bool high_priority) override {
    return inner_->create_stream(high_priority);
  }
  void destroy(CudaStream stream) noexcept override { inner_->destroy(stream); }
  void synchronize(CudaStream stream) override { inner_->synchronize(stream); }
  bool capturing(CudaStream stream) override { return inner_->capturing(stream); }
  CudaEvent create_event(EventKind kind) override { return inner_->create_event(kind); }
  void destroy(CudaEvent event) noexcept override { inner_->destroy(event); }
  bool passed(CudaEvent event) override { return inner_->passed(event); }
  void synchronize(CudaEvent event) override { inner_->synchronize(event); }
  double elapsed_s(CudaEvent from, CudaEvent to) override { return inner_->elapsed_s(from, to); }
  void* allocate(size_t bytes) override { return inner_->allocate(bytes); }
  void free(void* memory) noexcept override { inner_->free(memory); }
  void* allocate_pinned(size_t bytes) override { return inner_->allocate_pinned(bytes); }
  void free_pinned(void* memory) noexcept override { inner_->free_pinned(memory); }
  void copy(void* target, const void* source, size_t bytes, CudaStream stream) override {
    inner_->copy(target, source, bytes, stream);
  }
  void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                     CudaStream stream) override {
    inner_->copy_segments(segments, from, to, scale, stream);
  }
  void fill(void* target, DType dtype, int64_t count, double value, CudaStream stream) override {
    inner_->fill(target, dtype, count, value, stream);
  }
  void scatter_add(void* target, const int64_t* rows, const void* values, DType dtype,
                   int64_t count, int64_t width, CudaStream stream) override {
    inner_->scatter_add(target, rows, values, dtype, count, width, stream);
  }
  void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                   int64_t count, int64_t width, double scale, CudaStream stream) override {
    inner_->gather_rows(target, source, positions, dtype, count, width, scale, stream);
  }
  void partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                      int64_t most, int32_t* table, const RowGroups& groups,
                      CudaStream stream) override {
    inner_->partition_rows(partition, ids, count, most, table, groups, stream);
  }
  void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype,
                     CudaStream stream) override {
    inner_->encode_groups(codec, runs, dtype, stream);
  }
  void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                     int64_t stride, CudaStream stream) override {
    inner_->decode_groups(codec, runs, dtype, ranks, stride, stream);
  }
  void update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options,
                  CudaStream stream) override {
    inner_->update_sgd(tensors, dtype, options, stream);
  }
  void update_adam(std::span<const AdamTensor> tensors, DType dtype, const AdamOptions& options,
                   CudaStream stream) override {
    inner_->update_adam(tensors, dtype, options, stream);
  }
  void push_range(const char* name) override { inner_->push_range(name); }
  void pop_range() override { inner_->pop_range(); }

 private:
  struct Point {
    std::set<int> over;
    std::set<int> started;
    std::vector<CudaEvent> marks;  // events that were recorded here and stand for this very point
  };

  const std::shared_ptr<EmulatedCuda> inner_;
  mutable std::mutex mutex_;  // guards the three below
  std::map<CudaStream, Point> streams_;
  std::map<CudaEvent, Point> events_;
  std::vector<Begin> begins_;
};

}  // namespace usbyte::test
