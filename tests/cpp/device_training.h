// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cuda/emulation/emulated_cuda.h"
#include "random_training.h"
#include "usbyte/engine.h"

// Training on an emulated device, whose streams run late and in any order.
namespace usbyte::test {

/// Memory of a device for as long as this object lives.
class DeviceBytes {
 public:
  DeviceBytes(std::shared_ptr<Cuda> cuda, int64_t bytes)
      : cuda_(std::move(cuda)),
        data_(static_cast<std::byte*>(cuda_->allocate(static_cast<size_t>(bytes)))) {}
  ~DeviceBytes() { cuda_->free(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  std::byte* data() const { return data_; }

 private:
  const std::shared_ptr<Cuda> cuda_;
  std::byte* const data_;
};

/// A small whole number, so that sums are the same in any order and type.
template <typename T>
T whole_gradient(int rank, int64_t step, int64_t element) {
  return static_cast<T>(gradient<int64_t>(rank, step, element) % 1000);
}

/// Calls `body(bytes, value)` with the value of each element of the tensor in a flat buffer at
/// `memory`.
template <typename Value, typename Body>
void for_each_element(const Plan& plan, std::byte* memory, int tensor, Value value, Body body) {
  const TensorSpec& spec = plan.tensors()[static_cast<size_t>(tensor)];
  with_type(spec.dtype, [&]<typename T>(T) {
    std::byte* at = memory + plan.byte_offset(spec.offset);
    for (int64_t i = 0; i < spec.numel; ++i, at += sizeof(T)) {
      const T v = value.template operator()<T>(spec.offset + i);
      body(at, std::as_bytes(std::span(&v, 1)));
    }
  });
}

/// One rank's training. Kernels write gradients on any of `streams` streams, into memory that other
/// kernels write to as soon as the engine says that it may be used again; then kernels on any
/// stream take some of what has arrived. The host goes through all steps without looking; results
/// are checked at the end. With `update`, a kernel calls it with the whole flat buffer between the
/// reductions and the all_gathers. Returns how often the host has waited for the device meanwhile.
inline int64_t train_on_device(const Plan& plan, Communicator& network,
                               const std::shared_ptr<Cuda>& cuda, EmulatedCuda& kernels,
                               uint64_t seed, int64_t steps, int streams,
                               const std::function<void(std::byte*)>& update = {}) {
  Random random(seed + static_cast<uint64_t>(network.rank()));
  const auto n = plan.tensors().size();
  DeviceBytes flat_buffer(cuda, plan.flat_buffer_bytes()), sources(cuda, plan.flat_buffer_bytes());
  struct Result {
    std::vector<int> tensors;
    std::vector<std::byte> flat_buffer;
  };
  std::vector<Result> results(static_cast<size_t>(steps));
  std::vector<CudaStream> compute;
  for (int i = 0; i < streams; ++i) compute.push_back(cuda->create_stream(false));
  const CudaStream idle = cuda->create_stream(false);
  const auto any = [&] { return compute[static_cast<size_t>(random(0, streams - 1))]; };
  const auto order = [&] {
    std::vector<int> out(n);
    std::iota(out.begin(), out.end(), 0);
    std::shuffle(out.begin(), out.end(), random.engine());
    return out;
  };
  // As autograd does: what a pass does on any stream comes behind what was before it.
  const auto meet = [&] {
    for (CudaStream from : compute) {
      const CudaEvent event = cuda->create_event(EventKind::ordering);
      cuda->record(event, from);
      for (CudaStream to : compute) cuda->wait(to, event);
      cuda->destroy(event);
    }
  };
  const auto part = [&](int t) {
    const TensorSpec& spec = plan.tensors()[static_cast<size_t>(t)];
    return std::pair(plan.byte_offset(spec.offset), spec.numel * itemsize(spec.dtype));
  };
  int64_t waits = 0;
  {
    EngineOptions options;
    options.stall_limit_s = 60;
    options.device = cuda;
    options.hold_gathers = static_cast<bool>(update);
    Engine engine(plan, flat_buffer.data(), network, options);
    waits = -kernels.host_waits();
    for (int64_t step = 1; step <= steps; ++step) {
      engine.begin_step(compute[0]);
      for (int t : order()) {
        const CudaStream stream = any();
        const int64_t offset = part(t).first;
        if (random.one_in(6)) kernels.delay(stream, 5e-4);
        kernels.enqueue(stream, [&plan, t, step, source = sources.data(), rank = network.rank()] {
          for_each_element(
              plan, source, t,
              [&]<typename T>(int64_t i) { return whole_gradient<T>(rank, step, i); },
              [](std::byte* at, auto value) { std::memcpy(at, value.data(), value.size()); });
        });
        for (int p : engine.ready(t, stream, sources.data() + offset)) {
          const auto [begin, length] = part(p);
          kernels.enqueue(stream, [at = sources.data() + begin, count = length] {
            std::memset(at, 0xEE, static_cast<size_t>(count));
          });
        }
      }
      engine.end_backward();
      if (update) {
        const CudaStream stream = any();
        engine.wait_reduced({}, stream);
        kernels.enqueue(stream, [&update, data = flat_buffer.data()] { update(data); });
        engine.release_gathers(stream);
      }
      Result& result = results[static_cast<size_t>(step - 1)];
      result.flat_buffer.resize(static_cast<size_t>(plan.flat_buffer_bytes()));
      for (int t : order()) {
        if (random.one_in(3)) continue;
        result.tensors.push_back(t);
        const CudaStream stream = any();
        const auto [offset, bytes] = part(t);
        engine.wait(t, {}, stream);
        kernels.enqueue(
            stream, [to = result.flat_buffer.data() + offset, from = flat_buffer.data() + offset,
                     count = bytes] { std::memcpy(to, from, static_cast<size_t>(count)); });
      }
      engine.drain({}, idle);
      meet();
    }
    waits += kernels.host_waits();
    for (CudaStream stream : compute) cuda->synchronize(stream);
  }
  for (int64_t step = 1; step <= steps; ++step) {
    Result& result = results[static_cast<size_t>(step - 1)];
    int64_t wrong = 0;
    const auto sum = [&]<typename T>(int64_t i) {
      T out{};
      for (int r = 0; r < network.size(); ++r) out += whole_gradient<T>(r, step, i);
      return out;
    };
    for (int t : result.tensors) {
      for_each_element(plan, result.flat_buffer.data(), t, sum,
                       [&](const std::byte* at, auto value) {
                         wrong += std::memcmp(at, value.data(), value.size()) ? 1 : 0;
                       });
    }
    EXPECT_EQ(wrong, 0) << "elements of step " << step;
  }
  compute.push_back(idle);
  for (CudaStream stream : compute) cuda->destroy(stream);
  return waits;
}

}  // namespace usbyte::test
