// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "communicators.h"
#include "usbyte/engine.h"
#include "usbyte/error.h"

namespace usbyte::test {

constexpr int64_t kUnlimited = 1 << 20;

/// Tensors "a", "b", ... of 4 float32 elements, each all-reduced by itself, in order.
inline Plan plan_of(int tensors, int64_t window_bytes = kUnlimited) {
  std::vector<TensorSpec> specs;
  std::vector<Op> ops;
  for (int t = 0; t < tensors; ++t) {
    specs.push_back({std::string(1, static_cast<char>('a' + t)), 4, DType::float32, 4 * t});
    ops.push_back({Collective::all_reduce, {{4 * t, 4 * t + 4}}, window_bytes, false});
  }
  return Plan("test", specs, ops);
}

/// An engine whose ops complete when the test says so.
struct Rig {
  explicit Rig(Plan plan, EngineOptions options = {})
      : flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes())),
        engine(std::make_unique<Engine>(std::move(plan), flat_buffer.data(), communicator,
                                        std::move(options))) {}

  Engine* operator->() const { return engine.get(); }
  void backward() {
    engine->begin_step();
    for (int tensor : engine->unready()) engine->ready(tensor);
    engine->end_backward();
  }
  // Waits for the launch, as it may be up to the engine's own thread.
  void complete(int index, std::exception_ptr error = nullptr) {
    ASSERT_TRUE(communicator.await_launches(index + 1));
    communicator.complete(index, std::move(error));
  }
  void fail_op(int index, const char* why) {
    complete(index, std::make_exception_ptr(std::runtime_error(why)));
  }

  ManualCommunicator communicator;
  std::vector<std::byte> flat_buffer;
  std::unique_ptr<Engine> engine;
};

inline void expect_every_call_throws(Engine& engine, const std::string& text) {
  const std::vector<std::function<void()>> calls = {
      [&] { engine.begin_step(); }, [&] { engine.ready(0); }, [&] { engine.end_backward(); },
      [&] { engine.wait(0); }, [&] { engine.drain(); }};
  for (const auto& call : calls) EXPECT_EQ(message_of<FaultError>(call), text);
  EXPECT_EQ(engine.fault(), text);
}

}  // namespace usbyte::test
