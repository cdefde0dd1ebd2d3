// SPDX-License-Identifier: Apache-2.0
// Ops along dimensions of a mesh, of a device's memory: the same as of the host's, whatever is
// late.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coded_training.h"
#include "cuda/communicators/staged_communicator.h"
#include "random_dimension_paths.h"
#include "stream_mesh_rig.h"
#include "usbyte/codec.h"

namespace usbyte {
namespace {

using test::communicators;
using test::mesh;
using test::on_device;
using test::on_each_rank;
using test::on_host;
using test::Random;
using test::StreamMeshRig;
using test::Trained;

// The order in which a network adds up decides nothing: two numbers are added up, or whole ones.
bool is_exact(const Plan& plan, const Topology& topology) {
  bool rounded = itemsize(plan.dtype(Block{0, 1})) == 2;
  for (const Op& op : plan.ops()) {
    const auto codec = make_codec(op.codec);
    if (op.kind == Collective::all_gather) continue;
    const int ranks = op.dimension < 0
                          ? topology.ranks()
                          : topology.dimensions[static_cast<size_t>(op.dimension)].size;
    const bool by_network = !codec || (op.kind == Collective::all_reduce && codec->adds());
    if (ranks > 2 && by_network && (codec || rounded)) return false;
    rounded |=
        op.kind == Collective::reduce_scatter && codec;  // what is decoded is no longer whole
  }
  return true;
}

class DeviceDimensions : public testing::TestWithParam<uint64_t> {
 protected:
  DeviceDimensions()
      : topology_(mesh(test::kLineMeshes[seed_ % test::kLineMeshes.size()])), plan_(make()) {
    want_.resize(static_cast<size_t>(topology_.ranks()));
    const auto ranks = communicators(topology_);
    on_each_rank(topology_.ranks(), [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      want_[r] = on_host(plan_, *ranks[r], seed_);
    });
  }

  void expect_the_same(int rank, const Trained& got) const {
    const Trained& want = want_[static_cast<size_t>(rank)];
    EXPECT_EQ(got.flat_buffers, want.flat_buffers);
    EXPECT_EQ(got.codec_state, want.codec_state);
  }
  EmulatedCudaOptions late() const { return {.most_delay_s = seed_ % 2 ? 2e-4 : 0, .seed = seed_}; }

  const uint64_t seed_ = GetParam();
  const Topology topology_;
  const Plan plan_;

 private:
  Plan make() const {
    const std::vector<std::string> codecs = {
        "none",    "fp16",      "bf16",    "fp8",     "int8",     "int8,feedback=off",
        "topk:1",  "topk:0.2",  "dct:0.2", "dgc:0.2", "qsgd:4",   "terngrad",
        "signsgd", "efsignsgd", "signum",  "onebit",  "randk:0.3"};
    constexpr DType kTypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};
    Random random(seed_);
    for (;;) {
      Plan plan = test::random_lines(random, topology_, codecs,
                                     {"bf16", "int8,feedback=off", "topk:0.4,feedback=off"},
                                     kTypes[seed_ / 4 % 4]);
      if (is_exact(plan, topology_)) return plan;
    }
  }

  std::vector<Trained> want_;  // by rank
};
INSTANTIATE_TEST_SUITE_P(Engine, DeviceDimensions, testing::Range<uint64_t>(0, 24));

TEST_P(DeviceDimensions, TrainOverTheHostsNetworkAsTheHostDoes) {
  auto hosts = communicators(topology_);
  on_each_rank(topology_.ranks(), [&](int rank) {
    const auto cuda = make_emulated_cuda(late());
    {
      StagedCommunicator network(cuda, std::move(hosts[static_cast<size_t>(rank)]),
                                 {.chunk_bytes = 64, .buffers = 3});
      expect_the_same(rank, on_device(plan_, network, cuda, *cuda, seed_, nullptr));
    }
    EXPECT_EQ(cuda->live(), 0);
  });
}

TEST_P(DeviceDimensions, TrainOverNcclAsTheHostDoes) {
  const int slots = 1 + static_cast<int>(seed_ / 4 % 3);
  StreamMeshRig rig(topology_, slots, {}, late());
  rig.on_each(
      [&](int rank, Communicator& network) {
        expect_the_same(rank, on_device(plan_, network, rig.rig().shared_device(rank),
                                        rig.rig().cuda(), seed_, nullptr));
      },
      slots);
}

}  // namespace
}  // namespace usbyte
