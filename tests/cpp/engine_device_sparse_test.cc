// SPDX-License-Identifier: Apache-2.0
// Sparse sums of gradients on a device: the same as on the host, whatever is late.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "comm/local_communicator.h"
#include "cuda/communicators/staged_communicator.h"
#include "device_training.h"
#include "nccl_rig.h"
#include "sparse_rig.h"
#include "traced_cuda.h"
#include "usbyte/engine.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Random;
using test::Rows;

constexpr int64_t kSteps = 5, kRoom = 24, kNumel = 300;

// A dense tensor in two ops, and two sparse ones, one of which goes first.
Plan plan_of(DType dtype, const std::string& first, const std::string& second) {
  const std::vector<TensorSpec> tensors = {{"dense", kNumel, DType::float32, 0},
                                           {"words", 0, dtype, kNumel, 50, 4},
                                           {"more", 0, dtype, kNumel, 9, 1}};
  const auto sparse = [](int tensor, const std::string& by) {
    Op op{Collective::sparse_all_reduce, {}, 1 << 20, false};
    op.sparse = {tensor, by, 100};
    return op;
  };
  return Plan("test", tensors,
              {sparse(1, first),
               {Collective::all_reduce, {{0, 200}}, 1 << 20, false},
               sparse(2, second),
               {Collective::all_reduce, {{200, kNumel}}, 400, true}});
}

SparseShape shape_of(const Plan& plan, int tensor) {
  const TensorSpec& t = plan.tensors()[static_cast<size_t>(tensor)];
  return {t.rows, t.width, t.dtype};
}

// Rows in any order, some of them twice, whose sums are rounded.
struct Gradient {
  Gradient(const SparseShape& shape, int rank, int64_t step) {
    Random random(static_cast<uint64_t>(1000 * shape.rows + 100 * rank + step));
    for (int64_t i = random(0, kRoom); i > 0; --i) rows.ids.push_back(random(0, shape.rows - 1));
    for (int64_t i = std::ssize(rows.ids) * shape.width; i > 0; --i) {
      rows.values.push_back(static_cast<double>(random(-999, 999)) / 7);
    }
    values = test::packed(shape, rows);
  }

  Rows rows;
  Buffer values;
};

EngineOptions options_of(std::unique_ptr<Exchange> exchange) {
  EngineOptions out;
  out.stall_limit_s = 60;
  out.exchange = std::move(exchange);
  out.scale = 0.3;
  return out;
}

using Sums = std::vector<SparseRows>;  // of both tensors, step after step

Sums on_host(const Plan& plan, Communicator& network, std::unique_ptr<Exchange> exchange) {
  Sums out;
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  Engine engine(plan, flat_buffer.data(), network, options_of(std::move(exchange)));
  for (int64_t step = 1; step <= kSteps; ++step) {
    engine.begin_step();
    std::vector<Gradient> given;
    for (int t : {1, 2}) given.emplace_back(shape_of(plan, t), network.rank(), step);
    for (int t : {1, 2}) {
      const Gradient& gradient = given[static_cast<size_t>(t - 1)];
      engine.ready_rows(t, {gradient.rows.ids, gradient.values.data()});
    }
    engine.ready(0);
    engine.end_backward();
    engine.drain();
    for (int t : {1, 2}) out.push_back(engine.take_rows(t).rows);
  }
  return out;
}

/// Rows on a device, with room for more than there are.
class DeviceGradient {
 public:
  DeviceGradient(const std::shared_ptr<Cuda>& cuda, const SparseShape& shape)
      : shape_(shape), bytes_(8 + kRoom * (8 + shape.row_bytes())), memory_(cuda, bytes_) {}

  // What kernels do: on a device rows are coalesced.
  void write(int rank, int64_t step) const {
    const Gradient gradient(shape_, rank, step);
    const SparseRows rows = coalesce(shape_, {gradient.rows.ids, gradient.values.data()});
    const int64_t count = rows.count();
    std::memcpy(memory_.data(), &count, 8);
    std::copy_n(rows.ids.data(), count, reinterpret_cast<int64_t*>(ids()));
    std::copy_n(rows.values.data(), rows.values.size(), values());
  }
  void spoil() const { std::memset(memory_.data(), 0xEE, static_cast<size_t>(bytes_)); }

  void ready(Engine& engine, int tensor, CudaStream stream) const {
    const RowsView rows{{reinterpret_cast<const int64_t*>(ids()), kRoom}, values()};
    engine.ready_rows(tensor, rows, stream, reinterpret_cast<const int64_t*>(memory_.data()));
  }

 private:
  std::byte* ids() const { return memory_.data() + 8; }
  std::byte* values() const { return ids() + kRoom * 8; }

  const SparseShape shape_;
  const int64_t bytes_;
  const test::DeviceBytes memory_;
};

// Kernels write gradients late, on any stream, and spoil their memory once they have arrived.
Sums on_device(const Plan& plan, Communicator& network, std::unique_ptr<Exchange> exchange,
               const std::shared_ptr<Cuda>& cuda, EmulatedCuda& kernels, uint64_t seed,
               int64_t* waits = nullptr) {
  Sums out;
  const int rank = network.rank();
  Random random(seed + static_cast<uint64_t>(rank));
  const test::DeviceBytes flat_buffer(cuda, plan.flat_buffer_bytes()),
      result(cuda, plan.flat_buffer_bytes());
  const DeviceGradient words(cuda, shape_of(plan, 1)), more(cuda, shape_of(plan, 2));
  const DeviceGradient* const given[] = {&words, &more};
  auto* const dense = reinterpret_cast<float*>(flat_buffer.data());
  const CudaStream compute[] = {cuda->create_stream(false), cuda->create_stream(false)};
  EngineOptions options = options_of(std::move(exchange));
  options.device = cuda;
  {
    Engine engine(plan, flat_buffer.data(), network, options);
    const int64_t before = kernels.host_waits();
    for (int64_t step = 1; step <= kSteps; ++step) {
      engine.begin_step(compute[0]);
      for (int t : {2, 1}) {
        const CudaStream stream = compute[random(0, 1)];
        if (random.one_in(3)) kernels.delay(stream, 1e-3);
        const DeviceGradient& gradient = *given[t - 1];
        kernels.enqueue(stream, [&gradient, rank, step] { gradient.write(rank, step); });
        gradient.ready(engine, t, stream);
      }
      kernels.enqueue(compute[0], [dense] { std::fill_n(dense, kNumel, 10.0F); });
      engine.ready(0, compute[0]);
      engine.end_backward();
      for (int t : {1, 2}) {
        const CudaStream stream = compute[random(0, 1)];
        engine.wait(t, {}, stream);
        kernels.enqueue(stream, [&gradient = *given[t - 1]] { gradient.spoil(); });
        out.push_back(engine.take_rows(t).rows);
      }
      engine.drain({}, compute[0]);
      cuda->copy(result.data(), flat_buffer.data(), static_cast<size_t>(plan.flat_buffer_bytes()),
                 compute[0]);
      const CudaEvent event =
          cuda->create_event(EventKind::ordering);  // what spoils ends before the next step
      for (auto [from, to] : {std::pair(0, 1), std::pair(1, 0)}) {
        cuda->record(event, compute[from]);
        cuda->wait(compute[to], event);
      }
      cuda->destroy(event);
    }
    if (waits) *waits = kernels.host_waits() - before;
    for (CudaStream stream : compute) cuda->synchronize(stream);
  }
  const auto* const sums = reinterpret_cast<const float*>(result.data());
  const double want = 3.0 * network.size();
  const auto right = [want](float sum) { return std::abs(sum - want) < 1e-4; };
  EXPECT_EQ(std::count_if(sums, sums + kNumel, right), kNumel);
  for (CudaStream stream : compute) cuda->destroy(stream);
  return out;
}

void expect_same(const Sums& got, const Sums& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(got[i].ids, want[i].ids) << "sum " << i;
    ASSERT_EQ(got[i].values.size(), want[i].values.size());
    EXPECT_TRUE(std::ranges::equal(got[i].values.bytes(), want[i].values.bytes())) << "sum " << i;
  }
}

class SparseDevicePlans : public testing::TestWithParam<uint64_t> {
 protected:
  SparseDevicePlans() {
    auto communicators = make_local_communicators(size);
    auto exchanges = make_local_exchanges(size);
    on_each_rank(size, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      want[r] = on_host(plan, *communicators[r], std::move(exchanges[r]));
    });
  }

  static DType dtype_of(uint64_t seed) {
    constexpr DType kDtypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
    return kDtypes[seed / 4 % 4];
  }

  const uint64_t seed = GetParam();
  const int size = 1 + static_cast<int>(seed % 4);
  const Plan plan = plan_of(dtype_of(seed), seed % 3 ? "hierarchical" : "agsparse", "zen");
  const EmulatedCudaOptions late{.most_delay_s = seed % 2 ? 3e-4 : 0, .seed = seed};
  std::vector<Sums> want{static_cast<size_t>(size)};
};
INSTANTIATE_TEST_SUITE_P(Engine, SparseDevicePlans, testing::Range<uint64_t>(0, 20));

TEST_P(SparseDevicePlans, SumOverTheHostsNetworkAsTheHostDoes) {
  auto hosts = make_local_communicators(size);
  auto exchanges = make_local_exchanges(size);
  on_each_rank(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const auto cuda = make_emulated_cuda(late);
    {
      StagedCommunicator network(cuda, std::move(hosts[r]), {.chunk_bytes = 256, .buffers = 3});
      expect_same(on_device(plan, network, std::move(exchanges[r]), cuda, *cuda, seed), want[r]);
    }
    EXPECT_EQ(cuda->live(), 0);
  });
}

TEST_P(SparseDevicePlans, SumBesideNcclAsTheHostDoes) {
  test::NcclRig rig(size, 1 + static_cast<int>(seed / 4 % 3), {}, late);
  auto exchanges = make_local_exchanges(size);
  rig.on_each([&](int rank, Communicator& network) {
    const auto r = static_cast<size_t>(rank);
    int64_t waits = -1;
    expect_same(on_device(plan, network, std::move(exchanges[r]), rig.shared_device(rank),
                          rig.cuda(), seed, &waits),
                want[r]);
    if (size == 1) {
      EXPECT_EQ(waits, 0);  // else those of other ranks count, which begin and end
    }
  });
}

/// Counts what is dealt out.
class CountingCuda : public test::TracedCuda {
 public:
  using TracedCuda::TracedCuda;

  void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                   int64_t count, int64_t width, double scale, CudaStream stream) override {
    ++gathered;
    TracedCuda::gather_rows(target, source, positions, dtype, count, width, scale, stream);
  }

  std::atomic<int> gathered = 0;
};

/// A rank whose gradients are behind what one stream does; those that are dense come on another.
struct SparseRig {
  explicit SparseRig(EngineOptions given = {}, std::unique_ptr<Exchange> exchange = nullptr,
                     const std::string& first = "zen")
      : plan(plan_of(DType::float32, first, "zen")),
        network(cuda, std::move(make_local_communicators(1)[0])),
        options(std::move(given)) {
    if (!exchange) exchange = std::move(make_local_exchanges(1)[0]);
    options.exchange = std::move(exchange);
    options.device = device;
    engine = std::make_unique<Engine>(plan, flat_buffer.data(), network, options);
  }
  ~SparseRig() {
    engine.reset();
    cuda->synchronize(compute);
    cuda->destroy(compute);
    cuda->destroy(other);
  }

  // Nothing comes behind it until that is `released`.
  void stop_device() {
    cuda->enqueue(compute, [gate = released.get_future().share()] { gate.wait(); });
  }
  void backward() {
    engine->begin_step(other);
    cuda->enqueue(compute, [this] { words.write(0, 1), more.write(0, 1); });
    more.ready(*engine, 2, compute);
    words.ready(*engine, 1, compute);
    engine->ready(0, other);
    engine->end_backward();
  }

  const std::shared_ptr<EmulatedCuda> cuda = make_emulated_cuda();
  const CudaStream compute = cuda->create_stream(false), other = cuda->create_stream(false);
  const std::shared_ptr<CountingCuda> device = std::make_shared<CountingCuda>(cuda);
  const Plan plan;
  const test::DeviceBytes flat_buffer{cuda, plan.flat_buffer_bytes()};
  const DeviceGradient words{cuda, shape_of(plan, 1)}, more{cuda, shape_of(plan, 2)};
  StagedCommunicator network;
  EngineOptions options;
  std::unique_ptr<Engine> engine;
  std::promise<void> released;
};

TEST(EngineDeviceSparse, TheDeviceDealsOutWhatGoesByZen) {
  for (const auto& [first, dealt] : {std::pair("zen", 2), std::pair("agsparse", 1)}) {
    SparseRig rig({}, nullptr, first);
    rig.backward();
    rig.engine->drain({}, rig.other);
    EXPECT_EQ(rig.device->gathered, dealt) << first;
  }
}

TEST(EngineDeviceSparse, AFaultElsewhereEndsAWaitForRowsThatNeverCome) {
  SparseRig rig;
  rig.stop_device();
  rig.backward();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  rig.engine->fail("elsewhere");
  EXPECT_EQ(message_of<FaultError>([&] { rig.engine->wait(1, {}, rig.other); }), "elsewhere");
  rig.engine.reset();  // does not wait for what will never end
  rig.released.set_value();
}

TEST(EngineDeviceSparse, ARankThatIsLostEndsTheOthersWhoseRowsAreOnTheirWay) {
  auto exchanges = make_local_exchanges(2);
  SparseRig rig({}, std::move(exchanges[0]));
  rig.cuda->delay(rig.compute, 0.05);
  rig.backward();
  exchanges[1].reset();
  const std::string what = message_of<FaultError>([&] { rig.engine->wait(1, {}, rig.other); });
  EXPECT_NE(what.find("words) of step 1 failed"), std::string::npos) << what;
}

TEST(EngineDeviceSparse, NamesTheRowsThatAreStuck) {
  EngineOptions options;
  options.stall_limit_s = 0.3;
  SparseRig rig(options);
  rig.stop_device();
  rig.backward();
  const std::string what = message_of<FaultError>([&] { rig.engine->wait(2, {}, rig.other); });
  EXPECT_NE(what.find("(sparse_all_reduce, "), std::string::npos) << what;
  EXPECT_NE(what.find("words) of step 1 has not completed"), std::string::npos) << what;
  EXPECT_NE(what.find("stall limit"), std::string::npos) << what;
  rig.engine.reset();
  rig.released.set_value();
}

TEST(EngineDeviceSparse, EndsWithWhatIsInFlight) {
  SparseRig rig;
  rig.cuda->delay(rig.compute, 0.05);
  rig.backward();
  rig.engine.reset();
  rig.words.spoil();  // which nothing reads any more
}

TEST(EngineDeviceSparse, MoreRowsThanHaveRoomAreAFault) {
  SparseRig rig;
  rig.engine->begin_step(rig.other);
  rig.words.spoil();
  rig.words.ready(*rig.engine, 1, rig.compute);
  const std::string what = message_of<FaultError>([&] { rig.engine->wait(1, {}, rig.other); });
  EXPECT_NE(what.find("rows where 24 have room"), std::string::npos) << what;
}

TEST(EngineDeviceSparse, AllRowsAreThereIfTheyAreNotCounted) {
  SparseRig rig;
  rig.engine->begin_step(rig.other);
  const Gradient gradient(shape_of(rig.plan, 1), 0, 3);
  const SparseRows rows =
      coalesce(shape_of(rig.plan, 1), {gradient.rows.ids, gradient.values.data()});
  rig.engine->ready_rows(1, {rows.ids, rows.values.data()}, rig.compute);
  rig.engine->ready_rows(2, {}, rig.other);
  rig.engine->ready(0, rig.other);
  rig.engine->end_backward();
  rig.engine->drain({}, rig.other);
  EXPECT_EQ(rig.engine->take_rows(1).rows.ids, rows.ids);
  EXPECT_EQ(rig.engine->take_rows(2).rows.count(), 0);
}

TEST(EngineDeviceSparse, TellsTheDevicesTimes) {
  const std::string path = testing::TempDir() + "device_sparse_timeline.json";
  EngineOptions options;
  options.timed = true;
  SparseRig rig(options);
  rig.engine->set_timelines({std::make_shared<TimelineWriter>(path, 0, StepRange{})});
  const double start = now_s();
  rig.cuda->delay(rig.compute, 0.05);
  rig.backward();
  rig.engine->wait(1, {}, rig.other);
  rig.engine->drain({}, rig.other);
  const std::vector<double> ready = rig.engine->ready_times();
  for (int t : {1, 2}) EXPECT_GE(ready[static_cast<size_t>(t)], start + 0.049);
  const auto ops = rig.engine->op_times();
  for (size_t op : {0U, 2U}) {
    EXPECT_GE(ops[op].first, ready[1] - 1e-3);
    EXPECT_GE(ops[op].second, ops[op].first);
  }
  rig.engine->set_timelines({});
  int sparse = 0;
  for (const auto& event : nlohmann::json::parse(std::ifstream(path))) {
    if (event["ph"] != "X" || event["cat"] != "communication") continue;
    sparse += event["args"].contains("sum_rows");
  }
  EXPECT_EQ(sparse, 2);
}

}  // namespace
}  // namespace usbyte
