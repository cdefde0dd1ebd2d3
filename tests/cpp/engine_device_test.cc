// SPDX-License-Identifier: Apache-2.0
// The engine on a device: order by events alone, and no waiting on the host.

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <latch>
#include <nlohmann/json.hpp>

#include "comm/local_communicator.h"
#include "cuda/communicators/staged_communicator.h"
#include "cuda/device_clock.h"
#include "cuda/emulation/emulated_cuda.h"
#include "device_training.h"
#include "engine_rig.h"
#include "nccl_rig.h"

namespace usbyte {
namespace {

using test::message_of;
using test::plan_of;
using test::Random;

/// What the collectives of one rank do to bytes; together they change nothing.
struct Kernels {
  std::function<uint8_t(uint8_t)> all_reduce = [](uint8_t b) { return b; };
  std::function<uint8_t(uint8_t)> reduce_scatter = [](uint8_t b) { return b + 7; };
  std::function<uint8_t(uint8_t)> all_gather = [](uint8_t b) { return b - 7; };
};

/// One rank, whose collectives run on streams of their own.
class StreamCommunicator final : public Communicator {
 public:
  explicit StreamCommunicator(std::shared_ptr<EmulatedCuda> cuda, Kernels kernels = {},
                              size_t streams = 1)
      : cuda_(std::move(cuda)), kernels_(std::move(kernels)) {
    for (size_t i = 0; i < streams; ++i) streams_.push_back(cuda_->create_stream(true));
  }
  ~StreamCommunicator() override {
    for (CudaStream stream : streams_) {
      cuda_->synchronize(stream);  // what was aborted has ended before its memory goes
      cuda_->destroy(stream);
    }
  }

  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool stream_ordered() const override { return true; }
  std::string failure() override {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  void abort() override {
    std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }
  void launch(const Request& request, Completion done) override {
    if (on_launch) on_launch(launched_);
    const CudaStream stream = streams_[launched_++ % streams_.size()];
    for (CudaEvent event : request.order->after) cuda_->wait(stream, event);
    cuda_->record(request.order->started, stream);
    if (takes_s > 0) cuda_->delay(stream, takes_s);
    if (late_every > 0 && launched_ % late_every == 0) cuda_->delay(stream, 1e-3);
    const auto& kernel = request.kind == Collective::all_reduce       ? kernels_.all_reduce
                         : request.kind == Collective::reduce_scatter ? kernels_.reduce_scatter
                                                                      : kernels_.all_gather;
    const bool stuck = hangs || launched_ > hang_after;
    cuda_->enqueue(stream, [this, stuck, &kernel, spans = request.recv, dtype = request.dtype] {
      if (stuck) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return aborted_; });
      }
      for (const BufferView& span : spans) {
        auto* bytes = static_cast<uint8_t*>(span.data);
        std::transform(bytes, bytes + span.count * itemsize(dtype), bytes, kernel);
      }
    });
    cuda_->record(request.order->done, stream);
    done(nullptr);
  }

  void fail(const std::string& why) {
    std::lock_guard lock(mutex_);
    failure_ = why;
  }
  bool aborted() {
    std::lock_guard lock(mutex_);
    return aborted_;
  }

  // Set before the first launch.
  double takes_s = 0;
  size_t late_every = 0;
  bool hangs = false;
  size_t hang_after = SIZE_MAX;           // so many launches
  std::function<void(size_t)> on_launch;  // after so many others

 private:
  const std::shared_ptr<EmulatedCuda> cuda_;
  const Kernels kernels_;
  std::vector<CudaStream> streams_;
  size_t launched_ = 0;  // by one thread at a time
  std::mutex mutex_;     // guards the fields below
  std::condition_variable changed_;
  std::string failure_;
  bool aborted_ = false;
};

/// Calls `on_pack` before it packs gradients.
struct PackingCuda : test::TracedCuda {
  using TracedCuda::TracedCuda;
  void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                     CudaStream stream) override {
    on_pack();
    TracedCuda::copy_segments(segments, from, to, scale, stream);
  }
  std::function<void()> on_pack = [] {};
};

/// Streams that share one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1.
struct OneQueue : test::TracedCuda {
  explicit OneQueue(std::shared_ptr<EmulatedCuda> cuda)
      : TracedCuda(cuda), queue(cuda->create_stream(true)) {}
  ~OneQueue() override { inner().destroy(queue); }
  CudaStream create_stream(bool) override { return queue; }
  void destroy(CudaStream) noexcept override {}
  using TracedCuda::destroy;
  const CudaStream queue;
};

/// A plan on a device, its gradients in place, one compute stream.
struct DeviceRig {
  explicit DeviceRig(Plan plan, EngineOptions options = {},
                     std::shared_ptr<EmulatedCuda> emulated = make_emulated_cuda())
      : cuda(std::move(emulated)),
        flat_buffer(cuda, plan.flat_buffer_bytes()),
        communicator(cuda),
        compute(cuda->create_stream(false)) {
    std::memset(flat_buffer.data(), 0, static_cast<size_t>(plan.flat_buffer_bytes()));
    if (!options.device) options.device = cuda;
    engine = std::make_unique<Engine>(std::move(plan), flat_buffer.data(), communicator,
                                      std::move(options));
  }
  ~DeviceRig() {
    communicator.abort();
    engine.reset();
    cuda->destroy(compute);
  }

  void backward() {
    engine->begin_step(compute);
    for (int tensor : engine->unready()) engine->ready(tensor, compute);
    engine->end_backward();
  }
  /// The fault, once there is one; empty after 20 s.
  std::string await_fault() {
    for (int i = 0; i < 2000 && engine->fault().empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return engine->fault();
  }

  std::shared_ptr<EmulatedCuda> cuda;
  test::DeviceBytes flat_buffer;
  StreamCommunicator communicator;
  CudaStream compute;
  std::unique_ptr<Engine> engine;
};

class DevicePlans : public testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Engine, DevicePlans, testing::Range<uint64_t>(0, 40));

TEST_P(DevicePlans, KeepOrderThoughKernelsAreLateAndTheHostNeverWaits) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = test::regather(random_plan(random.engine()), random);
  const auto cuda = make_emulated_cuda({.most_delay_s = seed % 2 ? 3e-4 : 0, .seed = seed});
  {
    StreamCommunicator network(cuda, {}, 1 + seed % 4);
    network.late_every = 1 + seed % 3;
    EXPECT_EQ(
        test::train_on_device(plan, network, cuda, *cuda, seed, 4, 1 + static_cast<int>(seed % 3)),
        0);
  }
  EXPECT_EQ(cuda->live(), 0);
}

Plan two_phases(const Plan& plan) {
  std::vector<Op> ops;
  for (const Op& op : plan.ops()) {
    if (op.kind == Collective::all_gather) continue;
    ops.push_back(op);
    ops.back().kind = Collective::reduce_scatter;
  }
  const size_t scatters = ops.size();
  for (size_t i = 0; i < scatters; ++i) {
    ops.push_back(ops[i]);
    ops.back().kind = Collective::all_gather;
  }
  return Plan("two_phases", plan.tensors(), ops);
}

TEST_P(DevicePlans, GatherWhatWasReleased) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = two_phases(random_plan(random.engine()));
  const auto cuda = make_emulated_cuda({.most_delay_s = 3e-4, .seed = seed});
  Kernels kernels;
  kernels.all_gather = [](uint8_t b) { return static_cast<uint8_t>(b * 171 - 7); };
  StreamCommunicator network(cuda, kernels, 3);
  const auto update = [bytes = plan.flat_buffer_bytes()](std::byte* flat_buffer) {
    auto* at = reinterpret_cast<uint8_t*>(flat_buffer);
    std::transform(at, at + bytes, at, [](uint8_t b) { return static_cast<uint8_t>(b * 3); });
  };
  EXPECT_EQ(test::train_on_device(plan, network, cuda, *cuda, seed, 3, 2, update), 0);
}

// All ranks, over what is used in earnest.
TEST_P(DevicePlans, TrainOverNccl) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = test::regather(random_plan(random.engine()), random);
  const int size = 1 + static_cast<int>(seed % 4), slots = 1 + static_cast<int>(seed / 4 % 3);
  test::NcclRig rig(size, slots, {}, {.most_delay_s = seed % 2 ? 2e-4 : 0, .seed = seed});
  rig.on_each([&](int rank, Communicator& network) {
    const int64_t waits = test::train_on_device(plan, network, rig.shared_device(rank), rig.cuda(),
                                                100 * seed, 3, 1 + static_cast<int>(seed % 3));
    if (size == 1) {
      EXPECT_EQ(waits, 0);  // else those of other ranks count, which begin and end
    }
  });
}

TEST_P(DevicePlans, TrainOverTheHostsNetwork) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = test::regather(random_plan(random.engine()), random);
  const int size = 1 + static_cast<int>(seed % 4);
  auto hosts = make_local_communicators(size);
  test::on_each_rank(size, [&](int rank) {
    const auto cuda = make_emulated_cuda({.most_delay_s = seed % 2 ? 2e-4 : 0, .seed = seed});
    StagedCommunicator network(cuda, std::move(hosts[static_cast<size_t>(rank)]),
                               {.chunk_bytes = 256, .buffers = 3});
    test::train_on_device(plan, network, cuda, *cuda, 100 * seed, 3,
                          1 + static_cast<int>(seed % 3));
  });
}

TEST(EngineOnDevice, RunsAStepAheadOfADeviceThatIsBusy) {
  DeviceRig rig(plan_of(3));
  const int64_t before = rig.cuda->host_waits();
  rig.cuda->delay(rig.compute, 0.5);
  CudaEvent late = rig.cuda->create_event(EventKind::ordering);
  rig.cuda->record(late, rig.compute);
  for (int step = 0; step < 3; ++step) {
    rig.backward();
    for (int t = 0; t < 3; ++t) rig.engine->wait(t, {}, rig.compute);
  }
  EXPECT_FALSE(rig.cuda->passed(late));
  EXPECT_EQ(rig.cuda->host_waits(), before);
  rig.cuda->synchronize(rig.compute);
  rig.cuda->destroy(late);
}

TEST(EngineOnDevice, ScalesWhileItPacksAndOnlyOnce) {
  EngineOptions options;
  options.scale = 0.5;
  // Two ops cut through one tensor.
  const Plan plan("test", {{"a", 8, DType::float32, 0}},
                  {{Collective::all_reduce, {{0, 3}}, 64, false},
                   {Collective::all_reduce, {{3, 8}}, 64, false}});
  DeviceRig rig(plan, options);
  test::DeviceBytes source(rig.cuda, 32);
  std::vector<float> values(8);
  std::iota(values.begin(), values.end(), 1.0F);
  std::memcpy(source.data(), values.data(), 32);
  rig.engine->begin_step(rig.compute);
  EXPECT_EQ(rig.engine->ready(0, rig.compute, source.data()), std::vector<int>{0});
  rig.engine->end_backward();
  rig.engine->wait(0, {}, rig.compute);
  rig.cuda->synchronize(rig.compute);
  std::vector<float> got(8);
  std::memcpy(got.data(), rig.flat_buffer.data(), 32);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(got[i], values[i] / 2);
}

TEST(EngineOnDevice, KeepsGradientsUntilAnOpNeedsThem) {
  const Plan plan("test", {{"a", 4, DType::float32, 0}, {"b", 4, DType::float32, 4}},
                  {{Collective::all_reduce, {{0, 8}}, 64, false}});
  DeviceRig rig(plan);
  test::DeviceBytes source(rig.cuda, 32);
  rig.engine->begin_step(rig.compute);
  EXPECT_EQ(rig.engine->ready(1, rig.compute, source.data() + 16), std::vector<int>{});
  EXPECT_EQ(rig.engine->ready(0, rig.compute, source.data()), (std::vector<int>{0, 1}));
  rig.engine->end_backward();
  rig.engine->drain({}, rig.compute);
  rig.cuda->synchronize(rig.compute);
}

TEST(EngineOnDevice, RefusesToBeCaptured) {
  DeviceRig rig(plan_of(2));
  rig.cuda->set_capturing(rig.compute, true);
  EXPECT_NE(message_of<UsageError>([&] { rig.engine->begin_step(rig.compute); }).find("CUDA graph"),
            std::string::npos);
  rig.cuda->set_capturing(rig.compute, false);
  rig.backward();
  rig.cuda->set_capturing(rig.compute, true);
  EXPECT_NE(message_of<UsageError>([&] { rig.engine->wait(0, {}, rig.compute); }).find("captured"),
            std::string::npos);
  rig.cuda->set_capturing(rig.compute, false);
  rig.engine->wait(0, {}, rig.compute);
  rig.engine->drain({}, rig.compute);
  // Nothing is left to wait for.
  rig.cuda->set_capturing(rig.compute, true);
  rig.engine->wait(0, {}, rig.compute);
}

TEST(EngineOnDevice, NamesTheOpThatTheDeviceIsStuckIn) {
  EngineOptions options;
  options.stall_warning_s = 0.2;
  options.stall_limit_s = 4;  // a thread that sleeps past it does not warn
  std::mutex mutex;
  std::vector<std::string> warnings;
  options.on_warning = [&](const std::string& text) {
    std::lock_guard lock(mutex);
    warnings.push_back(text);
  };
  DeviceRig rig(plan_of(2), options);
  rig.communicator.hangs = true;
  rig.backward();
  const std::string fault = rig.await_fault();
  EXPECT_NE(fault.find("op 0 (all_reduce, 16 B: a) of step 1"), std::string::npos) << fault;
  EXPECT_NE(fault.find("stall limit"), std::string::npos) << fault;
  EXPECT_TRUE(rig.communicator.aborted());
  EXPECT_EQ(message_of<FaultError>([&] { rig.engine->wait(0, {}, rig.compute); }), fault);
  std::lock_guard lock(mutex);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("op 0"), std::string::npos);
}

// The host waits for its messages meanwhile, on a thread of its own.
TEST(EngineOnDevice, NamesTheCodedOpThatTheDeviceIsStuckIn) {
  const Plan plan("test", {{"a", 64, DType::float32, 0}, {"b", 64, DType::float32, 64}},
                  {{Collective::all_reduce, {{0, 64}}, test::kUnlimited, false, "topk:0.5"},
                   {Collective::all_reduce, {{64, 128}}, test::kUnlimited, false, "fp16"}});
  std::vector<float> codec_state(128);
  EngineOptions options;
  options.stall_limit_s = 0.6;
  options.codec_state = codec_state.data();
  DeviceRig rig(plan, options);
  rig.communicator.hangs = true;
  rig.backward();
  const std::string fault = rig.await_fault();
  EXPECT_NE(fault.find("by topk:0.5: a) of step 1"), std::string::npos) << fault;
  EXPECT_NE(fault.find("stall limit"), std::string::npos) << fault;
  EXPECT_TRUE(rig.communicator.aborted());
  EXPECT_EQ(message_of<FaultError>([&] { rig.engine->wait(1, {}, rig.compute); }), fault);
}

TEST(EngineOnDevice, DoesNotTakeLateGradientsForAStall) {
  EngineOptions options;
  options.stall_limit_s = 0.3;
  DeviceRig rig(plan_of(2), options);
  rig.cuda->delay(rig.compute, 1);
  rig.backward();
  rig.engine->drain({}, rig.compute);
  rig.cuda->synchronize(rig.compute);
  EXPECT_EQ(rig.engine->fault(), "");
}

// A device that has too much to do blocks who gives it more, for ever if it hangs.
TEST(EngineOnDevice, NoticesAStallWhileALaunchBlocksTheHost) {
  const auto cuda = make_emulated_cuda();
  const auto full = std::make_shared<PackingCuda>(cuda);
  EngineOptions options;
  options.device = full;
  options.stall_limit_s = 0.5;
  options.scale = 2;  // or nothing is packed
  DeviceRig rig(plan_of(3), options, cuda);
  rig.communicator.hang_after = 2;  // the last op of the first step hangs
  std::atomic<int> packed = 0;
  full->on_pack = [&] {  // the last gradient of the second step
    if (++packed < 6) return;
    while (!rig.communicator.aborted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  // The engine's thread is to need the order of the next op while the host is blocked.
  rig.communicator.on_launch = [&](size_t before) {
    while (before == 3 && packed < 6) std::this_thread::yield();
  };
  rig.backward();
  rig.engine->drain({}, rig.compute);
  try {
    rig.backward();
  } catch (const FaultError&) {  // if that comes before backward ends
  }
  const std::string fault = rig.await_fault();
  EXPECT_NE(fault.find("of step 1 has not completed"), std::string::npos) << fault;
}

TEST(EngineOnDevice, ItsClockDoesNotWaitForADeviceThatIsBusy) {
  const auto cuda = make_emulated_cuda();
  const auto shared = std::make_shared<OneQueue>(cuda);
  DeviceClock clock(shared);
  const auto gate = std::make_shared<std::latch>(1);
  cuda->enqueue(shared->queue, [gate] { gate->wait(); });
  clock.anchor();
  gate->count_down();
}

TEST(EngineOnDevice, FailsIfAGradientCannotBePacked) {
  const auto cuda = make_emulated_cuda();
  const auto device = std::make_shared<PackingCuda>(cuda);
  device->on_pack = [] { throw FaultError("out of memory"); };
  EngineOptions options;
  options.device = device;
  options.scale = 2;
  DeviceRig rig(plan_of(2), options, cuda);
  rig.engine->begin_step(rig.compute);
  EXPECT_EQ(message_of<FaultError>([&] { rig.engine->ready(0, rig.compute); }), "out of memory");
  EXPECT_EQ(rig.await_fault(), "out of memory");
  EXPECT_EQ(message_of<FaultError>([&] { rig.engine->drain({}, rig.compute); }), "out of memory");
}

TEST(EngineOnDevice, EndsBehindWhatItHasPacked) {
  EngineOptions options;
  options.scale = 3;
  DeviceRig rig(plan_of(2), options);
  float* const gradient = reinterpret_cast<float*>(rig.flat_buffer.data()) + 4;
  gradient[0] = 5;
  rig.engine->begin_step(rig.compute);
  rig.cuda->delay(rig.compute, 0.3);
  rig.engine->ready(1, rig.compute);  // op 0, which comes first, is not ready
  rig.engine.reset();
  EXPECT_EQ(gradient[0], 15);
}

TEST(EngineOnDevice, ReportsWhatFailsBehindItsBack) {
  DeviceRig rig(plan_of(2));
  rig.communicator.hangs = true;
  rig.backward();
  rig.communicator.fail("rank 1 is gone");
  EXPECT_EQ(rig.await_fault(), "op 0 (all_reduce, 16 B: a) of step 1 failed: rank 1 is gone");
  EXPECT_TRUE(rig.communicator.aborted());
}

TEST(EngineOnDevice, AbortsWhenAnotherRankHasFailed) {
  DeviceRig rig(plan_of(2));
  rig.communicator.hangs = true;
  rig.backward();
  rig.engine->fail("rank 3 ended");
  rig.cuda->synchronize(rig.compute);
  rig.engine.reset();  // does not wait for what will never end
  EXPECT_TRUE(rig.communicator.aborted());
}

// Updates that used the sums of others may have used halves of them.
TEST(EngineOnDevice, TellsWhichOpsHadEndedBeforeTheFault) {
  DeviceRig rig(plan_of(2));
  rig.communicator.hang_after = 3;
  for (int step = 0; step < 2; ++step) {
    rig.backward();
    rig.engine->wait(0, {}, rig.compute);
    rig.cuda->synchronize(rig.compute);
    rig.engine->drain({}, rig.compute);  // all have been launched
  }
  // Whoever has launched the last op must be done with that, or nobody looks at the device again.
  std::this_thread::sleep_for(std::chrono::seconds(1));
  rig.engine->fail("rank 3 ended");
  while (!rig.communicator.aborted()) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto status = nlohmann::json::parse(rig.engine->status());
  EXPECT_EQ(status.at("open_step"), 2);
  const auto& last = status.at("last");
  ASSERT_EQ(last.size(), 4U);
  for (size_t i = 0; i < 3; ++i) EXPECT_GE(last[i].at("took_s"), 0) << i;
  EXPECT_TRUE(last[3].at("took_s").is_null());  // though it has ended by now
}

TEST(EngineOnDevice, TellsTheDevicesTimes) {
  EngineOptions options;
  options.timed = true;
  DeviceRig rig(plan_of(2), options);
  rig.communicator.takes_s = 0.05;
  const double start = now_s();
  rig.engine->begin_step(rig.compute);
  rig.engine->ready(1, rig.compute);
  rig.cuda->delay(rig.compute, 0.1);
  rig.engine->ready(0, rig.compute);
  rig.engine->end_backward();
  rig.engine->drain({}, rig.compute);
  const std::vector<double> ready = rig.engine->ready_times();
  const auto ops = rig.engine->op_times();
  EXPECT_GE(ready[1], start - 0.01);
  EXPECT_GE(ready[0] - ready[1], 0.09);
  EXPECT_GE(ops[0].first, ready[0]);
  for (const auto& [launched, done] : ops) EXPECT_GE(done - launched, 0.049);
  EXPECT_GE(ops[1].first, ops[0].second - 1e-3);  // one stream
}

TEST(EngineOnDevice, WritesTheDevicesTimesToTheTimeline) {
  const std::string path = testing::TempDir() + "device_timeline.json";
  {
    DeviceRig rig(plan_of(2));
    DeviceClock clock(rig.cuda);
    rig.communicator.takes_s = 0.02;
    rig.engine->set_timelines({std::make_shared<TimelineWriter>(path, 0, StepRange{})});
    for (int step = 0; step < 2; ++step) {
      rig.backward();
      rig.engine->wait(0, {}, rig.compute);
      const Moment start = clock.mark(rig.compute);
      rig.cuda->delay(rig.compute, 0.01);
      rig.engine->record_update({0}, start, clock.mark(rig.compute));
      rig.engine->record_pass("backward", start, clock.mark(rig.compute));
      rig.engine->drain({}, rig.compute);
    }
    rig.engine->begin_step(rig.compute);
    rig.engine->set_timelines({});
  }
  int ops = 0, waits = 0, waits_for_all = 0, updates = 0, passes = 0, marks = 0;
  for (const auto& event : nlohmann::json::parse(std::ifstream(path))) {
    marks += event["ph"] == "i";
    if (event["ph"] != "X") continue;
    const std::string kind = event["cat"];
    if (kind == "communication") {
      ++ops;
      EXPECT_GE(event["dur"].get<double>(), 19e3);
    }
    if (kind == "wait" && event["args"]["step"] == 1) waits += event["dur"].get<double>() > 15e3;
    waits_for_all += kind == "wait" && event["name"] == "all gradients";
    if (kind == "update") {
      ++updates;
      EXPECT_GE(event["dur"].get<double>(), 9e3);
    }
    if (kind == "compute") {
      ++passes;
      EXPECT_EQ(event["name"], "backward");
      EXPECT_GE(event["dur"].get<double>(), 9e3);
    }
  }
  EXPECT_EQ(ops, 4);
  EXPECT_EQ(waits, 1);
  EXPECT_EQ(waits_for_all, 2);
  EXPECT_EQ(updates, 2);
  EXPECT_EQ(passes, 2);
  EXPECT_EQ(marks, 2);
}

}  // namespace
}  // namespace usbyte
