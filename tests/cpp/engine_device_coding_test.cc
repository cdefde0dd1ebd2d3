// Ops with codecs on a device: the same as on the host, whatever is late.

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "coded_plan.h"
#include "device_training.h"
#include "nccl_rig.h"
#include "sparse_rig.h"
#include "usbyte/codec.h"
#include "usbyte/engine.h"
#include "usbyte/local_communicator.h"
#include "usbyte/staged_communicator.h"

namespace usbyte {
namespace {

using test::coded_gradient;
using test::message_of;
using test::on_each_rank;
using test::Random;

constexpr int64_t kSteps = 4;

// What a rank has after its steps.
struct Trained {
  std::vector<std::vector<float>> arenas;  // after each step
  std::vector<float> memory;
};

std::vector<float> values_of(const Plan& plan, const std::byte* arena) {
  std::vector<float> out;
  for (int64_t e = 0; e < plan.numel(); ++e) out.push_back(test::get(plan, arena, e));
  return out;
}

void put_gradient(const Plan& plan, std::byte* arena, int rank, int64_t step, size_t tensor) {
  const TensorSpec& t = plan.tensors()[tensor];
  for (int64_t e = t.offset; e < t.end(); ++e) {
    test::put(plan, arena, e, coded_gradient(rank, step, e));
  }
}

EngineOptions options_of(float* memory, uint64_t seed) {
  EngineOptions out;
  out.stall_limit_s = 60;
  out.memory = memory;
  out.seed = seed;
  return out;
}

Trained on_host(const Plan& plan, Communicator& network, uint64_t seed) {
  Trained out;
  out.memory.resize(static_cast<size_t>(2 * plan.numel()));
  std::vector<std::byte> arena(static_cast<size_t>(plan.arena_bytes()));
  Engine engine(plan, arena.data(), network, options_of(out.memory.data(), seed));
  for (int64_t step = 1; step <= kSteps; ++step) {
    engine.begin_step();
    for (size_t t = plan.tensors().size(); t-- > 0;) {
      put_gradient(plan, arena.data(), network.rank(), step, t);
      engine.ready(static_cast<int>(t));
    }
    engine.end_backward();
    engine.drain();
    out.arenas.push_back(values_of(plan, arena.data()));
  }
  return out;
}

// The host does not look at what kernels do before the end.
Trained on_device(const Plan& plan, Communicator& network, const std::shared_ptr<Cuda>& cuda,
                  EmulatedCuda& kernels, uint64_t seed, std::shared_ptr<Exchange> exchange,
                  int64_t* waits = nullptr) {
  Trained out;
  Random random(seed + static_cast<uint64_t>(network.rank()));
  const test::DeviceBytes arena(cuda, plan.arena_bytes()), sources(cuda, plan.arena_bytes());
  const test::DeviceBytes memory(cuda, 2 * plan.numel() * itemsize(DType::float32));
  auto* const kept = reinterpret_cast<float*>(memory.data());
  std::fill_n(kept, 2 * plan.numel(), 0.0F);
  const CudaStream compute[] = {cuda->create_stream(false), cuda->create_stream(false)};
  EngineOptions options = options_of(kept, seed);
  options.device = cuda;
  options.exchange = std::move(exchange);
  out.arenas.resize(kSteps);
  {
    Engine engine(plan, arena.data(), network, options);
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
      kernels.enqueue(compute[0], [&plan, &to = out.arenas[static_cast<size_t>(step - 1)],
                                   from = arena.data()] { to = values_of(plan, from); });
      engine.drain({}, compute[0]);
      engine.drain({}, compute[1]);
    }
    if (waits) *waits = kernels.host_waits() - before;
    for (CudaStream stream : compute) cuda->synchronize(stream);
  }
  out.memory.assign(kept, kept + 2 * plan.numel());
  for (CudaStream stream : compute) cuda->destroy(stream);
  return out;
}

// Sums of 16-bit numbers depend on the order of ranks, which is the network's.
void expect_alike(const Plan& plan, const Trained& got, const Trained& want, int size) {
  for (const Op& op : plan.ops()) {
    const auto codec = make_codec(op.codec);
    const bool rounded = plan.dtype(op.blocks.front()) != DType::float64 && !codec;
    const bool sums = rounded || (codec && (codec->adds() || codec->matrices()));
    for (Block b : op.blocks) {
      for (auto e = static_cast<size_t>(b.begin); e < static_cast<size_t>(b.end); ++e) {
        for (size_t step = 0; step < kSteps; ++step) {
          ASSERT_NEAR(got.arenas[step][e], want.arenas[step][e], sums ? 0.3 * size : 0)
              << op.codec << ", step " << step;
        }
        const double far = codec && codec->matrices() ? 0.05 : 0;
        const size_t second = e + static_cast<size_t>(plan.numel());
        ASSERT_NEAR(got.memory[e], want.memory[e], far) << op.codec;
        ASSERT_NEAR(got.memory[second], want.memory[second], far) << op.codec;
      }
    }
  }
}

class CodedDevicePlans : public testing::TestWithParam<uint64_t> {
 protected:
  std::vector<Trained> wanted(const Plan& plan, int size, uint64_t seed) const {
    std::vector<Trained> out(static_cast<size_t>(size));
    const auto ranks = make_local_communicators(size, {});
    on_each_rank(size, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      out[r] = on_host(plan, *ranks[r], seed);
    });
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Engine, CodedDevicePlans, testing::Range<uint64_t>(0, 30));

TEST_P(CodedDevicePlans, TrainOverTheHostsNetworkAsTheHostDoes) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = test::random_coded_plan(random);
  const int size = 1 + static_cast<int>(seed % 4);
  const std::vector<Trained> want = wanted(plan, size, seed);
  const Plan summed = test::with_random_schemes(plan, random);
  auto hosts = make_local_communicators(size);
  const auto exchanges = test::shared_exchanges(size);
  on_each_rank(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const auto cuda = make_emulated_cuda({.most_delay_s = seed % 2 ? 2e-4 : 0, .seed = seed});
    {
      StagedCommunicator network(cuda, std::move(hosts[r]), {.chunk_bytes = 256, .buffers = 3});
      const Trained got = on_device(summed, network, cuda, *cuda, seed, exchanges[r]);
      expect_alike(plan, got, want[r], size);
    }
    EXPECT_EQ(cuda->live(), 0);
  });
}

TEST_P(CodedDevicePlans, TrainOverNcclAsTheHostDoes) {
  const uint64_t seed = GetParam();
  Random random(seed);
  const Plan plan = test::random_coded_plan(random);
  const int size = 1 + static_cast<int>(seed % 4), slots = 1 + static_cast<int>(seed / 4 % 3);
  const std::vector<Trained> want = wanted(plan, size, seed);
  test::NcclRig rig(size, slots, {}, {.most_delay_s = seed % 2 ? 2e-4 : 0, .seed = seed});
  const Plan summed = test::with_random_schemes(plan, random);
  const auto exchanges = test::shared_exchanges(size);
  rig.on_each([&](int rank, Communicator& network) {
    const auto r = static_cast<size_t>(rank);
    const Trained got =
        on_device(summed, network, rig.shared_device(rank), rig.cuda(), seed, exchanges[r]);
    expect_alike(plan, got, want[r], size);
  });
}

TEST(EngineDeviceCoding, TheHostDoesNotWaitForKernels) {
  const Plan plan("test", {{"a", 100, DType::float32, 0}, {"b", 90, DType::float32, 100}},
                  {{Collective::all_reduce, {{0, 60}}, 1 << 20, false, "fp16"},
                   {Collective::all_reduce, {{60, 110}}, 1 << 20, false, "bf16"},
                   {Collective::all_reduce, {{110, 150}}, 1 << 20, false, "int8"},
                   {Collective::reduce_scatter, {{150, 190}}, 1 << 20, false, "efsignsgd"},
                   {Collective::all_gather, {{150, 190}}, 1 << 20, false, "efsignsgd"}});
  test::NcclRig rig(1, 1);
  rig.on_each([&](int rank, Communicator& network) {
    int64_t waits = -1;
    on_device(plan, network, rig.shared_device(rank), rig.cuda(), 1, nullptr, &waits);
    EXPECT_EQ(waits, 0);
  });
}

}  // namespace
}  // namespace usbyte
