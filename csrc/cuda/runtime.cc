// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

#include <string>

#include "cuda/cuda.h"
#include "cuda/kernels/kernels.h"
#include "cuda_device.h"
#include "current_device.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

cudaStream_t native(CudaStream stream) { return reinterpret_cast<cudaStream_t>(stream.handle); }
cudaEvent_t native(CudaEvent event) { return reinterpret_cast<cudaEvent_t>(event.handle); }

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next call that asks for launch errors would find it again
  std::string text =
      std::string(call) + " failed: " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) {
    text +=
        "; leave the GPU, or for pinned memory the host, more room: a smaller batch, or fewer "
        "processes on it";
  } else {
    text += "; it may come from earlier work on the GPU, CUDA_LAUNCH_BLOCKING=1 shows which";
  }
  throw FaultError(text);
}

// This runtime is linked statically, beside the one that torch brings. Both work in the device's
// primary context, and a stream or an event is the driver's handle, so that either takes the
// other's; what a runtime keeps to itself is each thread's last error.
class Runtime final : public Cuda {
 public:
  explicit Runtime(int device) : device_(device) {
    const Entered entered(device_);
    check(cudaDeviceGetStreamPriorityRange(&least_priority_, &most_priority_),
          "cudaDeviceGetStreamPriorityRange");
    check(device::load(), "cudaFuncGetAttributes");
  }

  int device() const override { return device_; }

  CudaStream create_stream(bool high_priority) override {
    const Entered entered(device_);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                       high_priority ? most_priority_ : least_priority_),
          "cudaStreamCreateWithPriority");
    return {reinterpret_cast<uintptr_t>(stream)};
  }
  void destroy(CudaStream stream) noexcept override {
    give_back([&] { return cudaStreamDestroy(native(stream)); });
  }
  void synchronize(CudaStream stream) override {
    const Entered entered(device_);
    check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
  }
  bool capturing(CudaStream stream) override {
    const Entered entered(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(native(stream), &status);
    // The legacy stream while one is captured that it would synchronise with: work on it now would
    // be part of that capture, and break it.
    if (error == cudaErrorStreamCaptureImplicit) {
      cudaGetLastError();
      return true;
    }
    check(error, "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  CudaEvent create_event(EventKind kind) override {
    const Entered entered(device_);
    cudaEvent_t event = nullptr;
    unsigned flags = cudaEventDisableTiming;
    if (kind == EventKind::awaited) flags |= cudaEventBlockingSync;
    if (kind == EventKind::timed) flags = cudaEventDefault;
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
    return {reinterpret_cast<uintptr_t>(event)};
  }
  void destroy(CudaEvent event) noexcept override {
    give_back([&] { return cudaEventDestroy(native(event)); });
  }
  void record(CudaEvent event, CudaStream stream) override {
    const Entered entered(device_);
    check(cudaEventRecord(native(event), native(stream)), "cudaEventRecord");
  }
  void wait(CudaStream stream, CudaEvent event) override {
    const Entered entered(device_);
    check(cudaStreamWaitEvent(native(stream), native(event), 0), "cudaStreamWaitEvent");
  }
  bool passed(CudaEvent event) override {
    const Entered entered(device_);
    const cudaError_t error = cudaEventQuery(native(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(error, "cudaEventQuery");
    return true;
  }
  void synchronize(CudaEvent event) override {
    const Entered entered(device_);
    check(cudaEventSynchronize(native(event)), "cudaEventSynchronize");
  }
  double elapsed_s(CudaEvent from, CudaEvent to) override {
    const Entered entered(device_);
    float ms = 0;
    check(cudaEventElapsedTime(&ms, native(from), native(to)), "cudaEventElapsedTime");
    return static_cast<double>(ms) * 1e-3;
  }

  void* allocate(size_t bytes) override {
    if (bytes == 0) return nullptr;
    const Entered entered(device_);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void free(void* memory) noexcept override {
    give_back([&] { return cudaFree(memory); });
  }
  void* allocate_pinned(size_t bytes) override {
    if (bytes == 0) return nullptr;
    const Entered entered(device_);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    return memory;
  }
  void free_pinned(void* memory) noexcept override {
    give_back([&] { return cudaFreeHost(memory); });
  }
  void copy(void* target, const void* source, size_t bytes, CudaStream stream) override {
    if (bytes == 0) return;
    const Entered entered(device_);
    check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, native(stream)),
          "cudaMemcpyAsync");
  }

  void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                     CudaStream stream) override {
    const Entered entered(device_);
    check(device::copy_segments(segments, from, to, scale, native(stream)), "copy_segments");
  }
  void fill(void* target, DType dtype, int64_t count, double value, CudaStream stream) override {
    const Entered entered(device_);
    check(device::fill(target, dtype, count, value, native(stream)), "fill");
  }
  void scatter_add(void* target, const int64_t* rows, const void* values, DType dtype,
                   int64_t count, int64_t width, CudaStream stream) override {
    const Entered entered(device_);
    check(device::scatter_add(target, rows, values, dtype, count, width, native(stream)),
          "scatter_add");
  }
  void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                   int64_t count, int64_t width, double scale, CudaStream stream) override {
    const Entered entered(device_);
    check(
        device::gather_rows(target, source, positions, dtype, count, width, scale, native(stream)),
        "gather_rows");
  }
  void partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                      int64_t most, int32_t* table, const RowGroups& groups,
                      CudaStream stream) override {
    const Entered entered(device_);
    check(device::partition_rows(partition, ids, count, most, table, groups, native(stream)),
          "partition_rows");
  }
  void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype,
                     CudaStream stream) override {
    const Entered entered(device_);
    check(device::encode_groups(codec, runs, dtype, native(stream)), "encode_groups");
  }
  void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                     int64_t stride, CudaStream stream) override {
    const Entered entered(device_);
    check(device::decode_groups(codec, runs, dtype, ranks, stride, native(stream)),
          "decode_groups");
  }
  void update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options,
                  CudaStream stream) override {
    const Entered entered(device_);
    check(device::update_sgd(tensors, dtype, options, native(stream)), "update_sgd");
  }
  void update_adam(std::span<const AdamTensor> tensors, DType dtype, const AdamOptions& options,
                   CudaStream stream) override {
    const Entered entered(device_);
    check(device::update_adam(tensors, dtype, options, native(stream)), "update_adam");
  }

#if __has_include(<nvtx3/nvToolsExt.h>)
  void push_range(const char* name) override { nvtxRangePushA(name); }
  void pop_range() override { nvtxRangePop(); }
#else
  void push_range(const char*) override {}
  void pop_range() override {}
#endif

 private:
  // For one call: makes the device current, since stream 0, new objects and kernels belong to the
  // current one, and lets the call, of a background thread perhaps, not break a graph capture that
  // goes on elsewhere in the process. Not by cudaSetDevice, which makes a context on the device
  // that it is given, also on the one that it only puts back: every thread that never chose a
  // device would take hundreds of megabytes on device 0.
  class Entered {
   public:
    explicit Entered(int device) : current_(device) { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~Entered() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    const CurrentDevice current_;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  };

  // Nobody can be told of an error here, and at the process's end CUDA may be gone before its user.
  template <typename Call>
  void give_back(Call call) const noexcept {
    try {
      const Entered entered(device_);
      if (call() != cudaSuccess) cudaGetLastError();
    } catch (const FaultError&) {
    }
  }

  const int device_;
  int least_priority_ = 0;
  int most_priority_ = 0;
};

}  // namespace

std::shared_ptr<Cuda> make_cuda(int device) {
  const CudaInfo info = cuda_info();
  if (info.devices.empty()) throw UsageError("CUDA cannot be used: " + info.reason);
  const auto count = static_cast<int>(info.devices.size());
  if (device < 0 || device >= count) {
    throw UsageError("there is no CUDA device " + std::to_string(device) + ": " +
                     std::to_string(count) +
                     " can be seen, counted from 0; check CUDA_VISIBLE_DEVICES");
  }
  return std::make_shared<Runtime>(device);
}

}  // namespace usbyte
