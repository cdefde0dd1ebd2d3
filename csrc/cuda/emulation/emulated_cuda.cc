// SPDX-License-Identifier: Apache-2.0
#include "emulated_cuda.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "cuda/kernel_checks.h"
#include "emulated_stream.h"
#include "host_kernels.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using emulated::Flag;
using emulated::Mark;
using emulated::Stream;

struct Event {
  const bool timed;
  std::atomic<Mark*> last = nullptr;   // the last record; null: none yet
  std::atomic<bool> captured = false;  // that was in a capture
};

class Emulation final : public EmulatedCuda {
 public:
  explicit Emulation(EmulatedCudaOptions options) : options_(options) {}

  ~Emulation() override {
    stopping_.set();
    for (auto& [handle, stream] : streams_) {
      stream->push(nullptr);
      retired_.push_back(std::move(stream));
    }
    retired_.clear();
    for (const auto& [memory, pinned] : memory_) std::free(memory);
  }

  int device() const override { return 0; }

  CudaStream create_stream(bool) override {
    check();
    std::lock_guard lock(tables_);
    const uintptr_t handle = next_handle_++;
    streams_.emplace(handle, std::make_unique<Stream>(options_.seed + handle));
    return {handle};
  }
  void destroy(CudaStream stream) noexcept override {
    std::lock_guard lock(tables_);
    const auto found = streams_.find(stream.handle);
    if (found == streams_.end()) return misused(unknown("destroy", "stream", stream.handle));
    found->second->push(nullptr);
    retired_.push_back(std::move(found->second));
    streams_.erase(found);
  }
  void synchronize(CudaStream stream) override {
    check();
    if (stream.handle == 0) return;
    Stream& s = find(stream, "synchronize");
    if (s.is_complete()) return check();
    Mark& mark = make_mark();
    s.push([&mark] { mark.pass(); });
    await(mark);
  }
  bool capturing(CudaStream stream) override {
    check();
    if (stream.handle != 0) find(stream, "capturing");
    return is_captured(stream);
  }

  CudaEvent create_event(EventKind kind) override {
    check();
    std::lock_guard lock(tables_);
    const uintptr_t handle = next_handle_++;
    events_.emplace(handle, std::make_unique<Event>(kind == EventKind::timed));
    return {handle};
  }
  void destroy(CudaEvent event) noexcept override {
    std::lock_guard lock(tables_);
    if (events_.erase(event.handle) == 0) misused(unknown("destroy", "event", event.handle));
  }
  void record(CudaEvent event, CudaStream stream) override {
    check();
    Event& e = find(event, "record");
    Mark& mark = make_mark();
    if (stream.handle == 0) {
      mark.pass();
    } else {
      find(stream, "record").push([&mark] { mark.pass(); });
    }
    e.captured.store(is_captured(stream), std::memory_order_relaxed);
    e.last.store(&mark, std::memory_order_release);
  }
  void wait(CudaStream stream, CudaEvent event) override {
    check();
    const Mark* mark = find(event, "wait").last.load(std::memory_order_acquire);
    Stream* s = stream.handle == 0 ? nullptr : &find(stream, "wait");
    if (!mark) return;
    if (!s) return await(*mark);
    s->push([mark] { mark->passed.wait(); });
  }
  bool passed(CudaEvent event) override {
    check();
    const Mark* mark = find_timely(event, "passed").last.load(std::memory_order_acquire);
    return !mark || mark->passed.is_set();
  }
  void synchronize(CudaEvent event) override {
    check();
    const Mark* mark = find_timely(event, "synchronize").last.load(std::memory_order_acquire);
    if (mark) await(*mark);
  }
  double elapsed_s(CudaEvent from, CudaEvent to) override {
    check();
    return time_s(to) - time_s(from);
  }

  void* allocate(size_t bytes) override { return allocate(bytes, false); }
  void free(void* memory) noexcept override { free(memory, false); }
  void* allocate_pinned(size_t bytes) override { return allocate(bytes, true); }
  void free_pinned(void* memory) noexcept override { free(memory, true); }

  void copy(void* target, const void* source, size_t bytes, CudaStream stream) override {
    if (bytes == 0) return check();
    submit("copy", stream, [=] { std::memmove(target, source, bytes); });
  }
  void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                     CudaStream stream) override {
    check_copy(segments, from, to, scale);
    std::vector<CopySegment> taken(segments.begin(), segments.end());
    submit("copy_segments", stream, [taken = std::move(taken), from, to, scale] {
      host::copy_segments(taken, from, to, scale);
    });
  }
  void fill(void* target, DType dtype, int64_t count, double value, CudaStream stream) override {
    check_fill(target, dtype, count, value);
    submit("fill", stream, [=] { host::fill(target, dtype, count, value); });
  }
  void scatter_add(void* target, const int64_t* rows, const void* values, DType dtype,
                   int64_t count, int64_t width, CudaStream stream) override {
    check_scatter_add(target, rows, values, dtype, count, width);
    submit("scatter_add", stream,
           [=] { host::scatter_add(target, rows, values, dtype, count, width); });
  }
  void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                   int64_t count, int64_t width, double scale, CudaStream stream) override {
    check_gather_rows(target, source, positions, dtype, count, width, scale);
    submit("gather_rows", stream,
           [=] { host::gather_rows(target, source, positions, dtype, count, width, scale); });
  }
  void partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                      int64_t most, int32_t* table, const RowGroups& groups,
                      CudaStream stream) override {
    check_partition(partition, ids, count, most, table, groups);
    submit("partition_rows", stream,
           [=] { host::partition_rows(partition, ids, count, most, table, groups); });
  }
  void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype,
                     CudaStream stream) override {
    check_encode(codec, runs, dtype);
    std::vector<GroupEncoding> taken(runs.begin(), runs.end());
    submit("encode_groups", stream,
           [taken = std::move(taken), codec, dtype] { host::encode_groups(codec, taken, dtype); });
  }
  void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                     int64_t stride, CudaStream stream) override {
    check_decode(codec, runs, dtype, ranks, stride);
    std::vector<GroupDecoding> taken(runs.begin(), runs.end());
    submit("decode_groups", stream, [taken = std::move(taken), codec, dtype, ranks, stride] {
      host::decode_groups(codec, taken, dtype, ranks, stride);
    });
  }
  void update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options,
                  CudaStream stream) override {
    check_sgd(tensors, dtype, options);
    std::vector<SgdTensor> taken(tensors.begin(), tensors.end());
    submit("update_sgd", stream,
           [taken = std::move(taken), dtype, options] { host::update_sgd(taken, dtype, options); });
  }
  void update_adam(std::span<const AdamTensor> tensors, DType dtype, const AdamOptions& options,
                   CudaStream stream) override {
    check_adam(tensors, dtype);
    std::vector<AdamTensor> taken(tensors.begin(), tensors.end());
    submit("update_adam", stream, [taken = std::move(taken), dtype, options] {
      host::update_adam(taken, dtype, options);
    });
  }

  void push_range(const char*) override {}
  void pop_range() override {}

  void enqueue(CudaStream stream, std::function<void()> work) override {
    submit("enqueue", stream, std::move(work));
  }
  void delay(CudaStream stream, double seconds) override {
    check();
    if (stream.handle == 0) return stopping_.wait_for(seconds);
    find(stream, "delay").push([this, seconds] { stopping_.wait_for(seconds); });
  }
  void set_capturing(CudaStream stream, bool capturing) override {
    std::lock_guard lock(tables_);
    if (capturing) {
      capturing_.insert(stream);
    } else {
      capturing_.erase(stream);
    }
  }
  int64_t host_waits() const override { return host_waits_.load(std::memory_order_relaxed); }
  int64_t live() const override {
    std::shared_lock lock(tables_);
    return static_cast<int64_t>(streams_.size() + events_.size() + memory_.size());
  }
  void poison(const std::string& error) override { misused(error); }

 private:
  static std::string unknown(const char* call, const char* what, uintptr_t handle) {
    return std::string("emulated CUDA: ") + call + ": no " + what + " " + std::to_string(handle) +
           "; it was destroyed or is another device's";
  }

  void check() const {
    if (!poisoned_.load(std::memory_order_acquire)) return;
    std::lock_guard lock(error_mutex_);
    throw FaultError(error_);
  }

  // Also of calls that cannot throw, for the next one that can.
  void misused(const std::string& error) {
    std::lock_guard lock(error_mutex_);
    if (error_.empty()) error_ = error;
    poisoned_.store(true, std::memory_order_release);
  }

  Stream& find(CudaStream stream, const char* call) {
    std::shared_lock lock(tables_);
    const auto found = streams_.find(stream.handle);
    if (found == streams_.end()) throw FaultError(unknown(call, "stream", stream.handle));
    return *found->second;
  }
  Event& find(CudaEvent event, const char* call) {
    std::shared_lock lock(tables_);
    const auto found = events_.find(event.handle);
    if (found == events_.end()) throw FaultError(unknown(call, "event", event.handle));
    return *found->second;
  }

  // For the host, to which an event in a graph never passes.
  Event& find_timely(CudaEvent event, const char* call) {
    Event& e = find(event, call);
    if (!e.captured.load(std::memory_order_relaxed)) return e;
    throw FaultError(std::string("emulated CUDA: ") + call +
                     ": the event was last recorded in a capture");
  }
  bool is_captured(CudaStream stream) const {
    std::shared_lock lock(tables_);
    return capturing_.contains(stream);
  }

  Mark& make_mark() {
    std::lock_guard lock(marks_mutex_);
    return marks_.emplace_back();
  }

  void await(const Mark& mark) {
    if (!mark.passed.is_set()) {
      host_waits_.fetch_add(1, std::memory_order_relaxed);
      mark.passed.wait();
    }
    check();
  }

  double time_s(CudaEvent event) {
    const Event& e = find_timely(event, "elapsed_s");
    if (!e.timed) throw FaultError("emulated CUDA: elapsed_s: an event was made without timing");
    const Mark* mark = e.last.load(std::memory_order_acquire);
    if (!mark || !mark->passed.is_set()) {
      throw FaultError("emulated CUDA: elapsed_s: an event has not passed");
    }
    return mark->time_s;
  }

  void submit(const char* call, CudaStream stream, std::function<void()> work) {
    check();
    if (stream.handle == 0) return work();
    Stream& s = find(stream, call);
    s.push([this, &s, call, work = std::move(work)] {
      stopping_.wait_for(s.random_s(options_.most_delay_s));
      try {
        work();
      } catch (const std::exception& e) {
        misused(std::string("emulated CUDA: ") + call + ": " + e.what());
      }
    });
  }

  void* allocate(size_t bytes, bool pinned) {
    check();
    if (bytes == 0) return nullptr;
    constexpr size_t kAlignment = 256;
    void* memory =
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (!memory) {
      throw FaultError("emulated CUDA: out of memory: " + std::to_string(bytes) + " bytes");
    }
    std::memset(memory, 0xCD, bytes);
    std::lock_guard lock(tables_);
    memory_.emplace(memory, pinned);
    return memory;
  }
  void free(void* memory, bool pinned) noexcept {
    if (!memory) return;
    {
      std::lock_guard lock(tables_);
      const auto found = memory_.find(memory);
      if (found == memory_.end() || found->second != pinned) {
        return misused(std::string("emulated CUDA: ") + (pinned ? "free_pinned" : "free") +
                       " of memory that is free already or of another kind");
      }
      memory_.erase(found);
    }
    std::free(memory);
  }

  const EmulatedCudaOptions options_;
  Flag stopping_;  // ends all delays; work still runs
  std::atomic<int64_t> host_waits_ = 0;
  std::atomic<bool> poisoned_ = false;

  mutable std::mutex error_mutex_;
  std::string error_;  // the first; guarded by error_mutex_

  std::mutex marks_mutex_;
  std::deque<Mark> marks_;  // guarded by marks_mutex_

  // Guards what is below. Shared by lookups, so that callers do not order one another; never taken
  // by a stream's thread.
  mutable std::shared_mutex tables_;
  uintptr_t next_handle_ = 1;  // of streams and events alike; none is used twice
  std::map<uintptr_t, std::unique_ptr<Stream>> streams_;
  std::map<uintptr_t, std::unique_ptr<Event>> events_;
  std::set<CudaStream> capturing_;
  std::map<void*, bool> memory_;                  // to whether it is pinned
  std::vector<std::unique_ptr<Stream>> retired_;  // destroyed, perhaps with work left
};

}  // namespace

std::shared_ptr<EmulatedCuda> make_emulated_cuda(EmulatedCudaOptions options) {
  if (!(options.most_delay_s >= 0 && options.most_delay_s < 1e6)) {
    throw UsageError("make_emulated_cuda: most_delay_s must be a number of seconds, not " +
                     std::to_string(options.most_delay_s));
  }
  return std::make_shared<Emulation>(options);
}

}  // namespace usbyte
