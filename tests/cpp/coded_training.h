// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "coded_plan.h"
#include "device_training.h"
#include "usbyte/engine.h"

// Training with codecs, on the host and on an emulated device.
namespace usbyte::test {

inline constexpr int64_t kSteps = 4;

/// What a rank has after its steps.
struct Trained {
  std::vector<std::vector<float>> flat_buffers;  // after each step
  std::vector<float> codec_state;
};

inline std::vector<float> values_of(const Plan& plan, const std::byte* flat_buffer) {
  std::vector<float> out;
  for (int64_t e = 0; e < plan.numel(); ++e) out.push_back(get(plan, flat_buffer, e));
  return out;
}

inline void put_gradient(const Plan& plan, std::byte* flat_buffer, int rank, int64_t step,
                         size_t tensor) {
  const TensorSpec& t = plan.tensors()[tensor];
  for (int64_t e = t.offset; e < t.end(); ++e) {
    put(plan, flat_buffer, e, coded_gradient(rank, step, e));
  }
}

inline EngineOptions options_of(float* codec_state, uint64_t seed) {
  EngineOptions out;
  out.stall_limit_s = 60;
  out.codec_state = codec_state;
  out.seed = seed;
  return out;
}

/// Trains; rows of codec state, of which there are two, are as they are in the end.
inline Trained on_host(const Plan& plan, Communicator& network, uint64_t seed) {
  Trained out;
  out.codec_state.resize(static_cast<size_t>(2 * plan.numel()));
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  Engine engine(plan, flat_buffer.data(), network, options_of(out.codec_state.data(), seed));
  for (int64_t step = 1; step <= kSteps; ++step) {
    engine.begin_step();
    for (size_t t = plan.tensors().size(); t-- > 0;) {
      put_gradient(plan, flat_buffer.data(), network.rank(), step, t);
      engine.ready(static_cast<int>(t));
    }
    engine.end_backward();
    engine.drain();
    out.flat_buffers.push_back(values_of(plan, flat_buffer.data()));
  }
  return out;
}

/// The same on a device. The host does not look at what kernels do before the end.
inline Trained on_device(const Plan& plan, Communicator& network, const std::shared_ptr<Cuda>& cuda,
                         EmulatedCuda& kernels, uint64_t seed, std::shared_ptr<Exchange> exchange,
                         int64_t* waits = nullptr) {
  Trained out;
  Random random(seed + static_cast<uint64_t>(network.rank()));
  const DeviceBytes flat_buffer(cuda, plan.flat_buffer_bytes()),
      sources(cuda, plan.flat_buffer_bytes());
  const DeviceBytes codec_state(cuda, 2 * plan.numel() * itemsize(DType::float32));
  auto* const kept = reinterpret_cast<float*>(codec_state.data());
  std::fill_n(kept, 2 * plan.numel(), 0.0F);
  const CudaStream compute[] = {cuda->create_stream(false), cuda->create_stream(false)};
  EngineOptions options = options_of(kept, seed);
  options.device = cuda;
  options.exchange = std::move(exchange);
  out.flat_buffers.resize(kSteps);
  {
    Engine engine(plan, flat_buffer.data(), network, options);
    const int64_t before = kernels.host_waits();
    for (int64_t step = 1; step <= kSteps; ++step) {
      engine.begin_step(compute[0]);
      for (size_t t = plan.tensors().size(); t-- > 0;) {
        const CudaStream stream = compute[random(0, 1)];
        if (random.one_in(6)) kernels.delay(stream, 5e-4);
        kernels.enqueue(stream, [&plan, step, t, to = sources.data(), rank = network.rank()] {
          put_gradient(plan, to, rank, step, t);
        });
        engine.ready(static_cast<int>(t), stream,
                     sources.data() + plan.byte_offset(plan.tensors()[t].offset));
      }
      engine.end_backward();
      for (size_t t = 0; t < plan.tensors().size(); ++t) {
        engine.wait(static_cast<int>(t), {}, compute[0]);
      }
      kernels.enqueue(compute[0], [&plan, &to = out.flat_buffers[static_cast<size_t>(step - 1)],
                                   from = flat_buffer.data()] { to = values_of(plan, from); });
      engine.drain({}, compute[0]);
      engine.drain({}, compute[1]);
    }
    if (waits) *waits = kernels.host_waits() - before;
    for (CudaStream stream : compute) cuda->synchronize(stream);
  }
  out.codec_state.assign(kept, kept + 2 * plan.numel());
  for (CudaStream stream : compute) cuda->destroy(stream);
  return out;
}

}  // namespace usbyte::test
