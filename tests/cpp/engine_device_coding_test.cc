// SPDX-License-Identifier: Apache-2.0
// Ops with codecs on a device: the same as on the host, whatever is late.

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "coded_training.h"
#include "comm/local_communicator.h"
#include "cuda/communicators/staged_communicator.h"
#include "nccl_rig.h"
#include "sparse_rig.h"
#include "usbyte/codec.h"
#include "usbyte/engine.h"

namespace usbyte {
namespace {

using test::kSteps;
using test::on_device;
using test::on_each_rank;
using test::on_host;
using test::Random;
using test::Trained;

// Sums of 16-bit numbers depend on the order of ranks, which is the network's.
void expect_alike(const Plan& plan, const Trained& got, const Trained& want, int size) {
  for (const Op& op : plan.ops()) {
    const auto codec = make_codec(op.codec);
    const bool rounded = plan.dtype(op.blocks.front()) != DType::float64 && !codec;
    const bool sums = rounded || (codec && (codec->adds() || codec->matrices()));
    for (Block b : op.blocks) {
      for (auto e = static_cast<size_t>(b.begin); e < static_cast<size_t>(b.end); ++e) {
        for (size_t step = 0; step < kSteps; ++step) {
          ASSERT_NEAR(got.flat_buffers[step][e], want.flat_buffers[step][e], sums ? 0.3 * size : 0)
              << op.codec << ", step " << step;
        }
        const double far = codec && codec->matrices() ? 0.05 : 0;
        const size_t second = e + static_cast<size_t>(plan.numel());
        ASSERT_NEAR(got.codec_state[e], want.codec_state[e], far) << op.codec;
        ASSERT_NEAR(got.codec_state[second], want.codec_state[second], far) << op.codec;
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
