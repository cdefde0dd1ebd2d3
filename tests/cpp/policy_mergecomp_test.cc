// SPDX-License-Identifier: Apache-2.0
// MergeComp: groups of gradients that are encoded, sent and decoded as one.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "random_job.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

struct Job {
  Profile profile;
  NetworkModel network;
  PolicyOptions options;
};

CodecCost random_cost(std::mt19937& rng) {
  const auto cost = [&] {
    const double alpha = uniform(rng, 0, 3) ? uniform_real(rng, 0, 0.1) : 0;
    return AlphaBeta{alpha, std::exp(uniform_real(rng, std::log(1e-10), std::log(1e-7))), alpha};
  };
  const bool at_once = uniform(rng, 0, 1) == 1;
  return {cost(), cost(), at_once, at_once ? uniform_real(rng, 0, 1e-8) : 0};
}

Job random_coded_job(std::mt19937& rng, int64_t tensors, bool coded) {
  Job job;
  job.profile = random_job(rng, tensors, 1e7);
  job.network = random_network(rng);
  if (uniform(rng, 0, 1)) {  // then it matters which of them are neighbours in the flat buffer
    job.network.pack_s_per_byte = 1e-7;
    std::shuffle(job.profile.ready_s.begin(), job.profile.ready_s.end(), rng);
  }
  job.options.overlap = uniform(rng, 0, 2) ? Overlap::forward : Overlap::backward;
  if (!coded) return job;
  const std::vector<std::string> specs{"fp16", "topk:0.01", "int8", "none"};
  const bool mixed = uniform(rng, 0, 1) == 1;
  for (const TensorSpec& t : job.profile.tensors) {
    const std::string& spec = specs[static_cast<size_t>(mixed ? uniform(rng, 0, 3) : 0)];
    job.options.codec_of.push_back(is_floating(t.dtype) ? spec : "none");
  }
  if (uniform(rng, 0, 4) == 0) return job;
  for (const std::string& spec : specs) {
    if (spec != "none") job.options.codec_costs.by_spec[spec] = random_cost(rng);
  }
  return job;
}

// The plan that cuts backward behind tensor i where bit i is set.
Plan grouped(const Job& job, uint32_t cuts) {
  const Profile& p = job.profile;
  const std::vector<int> order = backward_order(p);
  std::vector<Op> ops;
  std::vector<std::pair<std::string, DType>> lanes;  // of the group's ops
  size_t first = 0;                                  // op of the group
  for (size_t i = 0; i < order.size(); ++i) {
    const TensorSpec& t = p.tensors[static_cast<size_t>(order[i])];
    const std::pair lane(
        job.options.codec_of.empty() ? "none" : job.options.codec_of[static_cast<size_t>(order[i])],
        t.dtype);
    Op op{Collective::all_reduce, {}, 1 << 30, true, lane.first};
    auto it = std::find(lanes.begin(), lanes.end(), lane);
    if (it != lanes.end()) {  // ready later, it goes behind the others
      const auto at = ops.begin() + static_cast<std::ptrdiff_t>(first) + (it - lanes.begin());
      op = *at;
      ops.erase(at);
      lanes.erase(it);
    }
    const auto neighbour = std::find_if(op.blocks.begin(), op.blocks.end(), [&](Block b) {
      return b.end == t.offset || b.begin == t.end();
    });
    op.blocks.push_back({t.offset, t.end()});
    if (neighbour != op.blocks.end() - 1) {
      std::sort(op.blocks.begin(), op.blocks.end());
      for (size_t k = 1; k < op.blocks.size();) {
        if (op.blocks[k - 1].end != op.blocks[k].begin) {
          ++k;
          continue;
        }
        op.blocks[k - 1].end = op.blocks[k].end;
        op.blocks.erase(op.blocks.begin() + static_cast<std::ptrdiff_t>(k));
      }
    }
    ops.push_back(op);
    lanes.push_back(lane);
    if (i < 32 && (cuts >> i & 1)) {
      first = ops.size();
      lanes.clear();
    }
  }
  return Plan("test", p.tensors, ops);
}

Simulator simulator_of(const Job& job) {
  return Simulator(job.profile, job.network, job.options.overlap, false, job.options.codec_costs);
}

double least_lateness_s(const Job& job) {
  Simulator simulator = simulator_of(job);
  double least = std::numeric_limits<double>::infinity();
  for (uint32_t cuts = 0; cuts < 1U << (job.profile.tensors.size() - 1); ++cuts) {
    least = std::min(least, simulator.lateness_s(grouped(job, cuts)));
  }
  return least;
}

double lateness_s(const Job& job) {
  Simulator simulator = simulator_of(job);
  return simulator.lateness_s(make_plan("mergecomp", job.profile, job.network, job.options));
}

TEST(MergeComp, NoGroupingIsBetter) {
  std::mt19937 rng(31);
  int merged = 0, cut = 0;
  for (int i = 0; i < cases(400); ++i) {
    const Job job = random_coded_job(rng, uniform(rng, 1, 9), i % 4 > 0);
    const Plan plan = make_plan("mergecomp", job.profile, job.network, job.options);
    const double least = least_lateness_s(job);
    ASSERT_NEAR(lateness_s(job), least, 1e-9 * job.profile.iteration_s() + 1e-9 * std::abs(least))
        << i;
    Simulator simulator = simulator_of(job);
    const double none_s = simulator.lateness_s(grouped(job, ~0U)) - least;
    const double all_s = simulator.lateness_s(grouped(job, 0)) - least;
    merged += none_s > 1e-6;
    cut += all_s > 1e-6;
  }
  EXPECT_GT(merged, cases(400) / 4);
  EXPECT_GT(cut, cases(400) / 4);
}

TEST(MergeComp, NoGroupingOfTenTensorsIsBetter) {
  std::mt19937 rng(32);
  for (int i = 0; i < cases(40); ++i) {
    const Job job = random_coded_job(rng, 10, true);
    const double least = least_lateness_s(job);
    ASSERT_NEAR(lateness_s(job), least, 1e-9 * job.profile.iteration_s() + 1e-9 * std::abs(least));
  }
}

TEST(MergeComp, NoGroupingIsBetterWhereNothingIsCompressed) {
  std::mt19937 rng(33);
  for (int i = 0; i < cases(12); ++i) {
    const Job job = random_coded_job(rng, 13, false);
    const double least = least_lateness_s(job);
    ASSERT_NEAR(lateness_s(job), least, 1e-9 * job.profile.iteration_s() + 1e-9 * std::abs(least));
  }
}

TEST(MergeComp, HardlyAnyGroupingIsBetterWhereGroupingsAreGivenUp) {
  std::mt19937 rng(34);
  double sum = 0;
  for (int i = 0; i < cases(12); ++i) {
    const Job job = random_coded_job(rng, 13, true);
    Simulator simulator = simulator_of(job);
    const double least_s = simulator.iteration_s() + std::max(least_lateness_s(job), 0.0);
    const double step_s = simulator.iteration_s() + std::max(lateness_s(job), 0.0);
    EXPECT_GE(step_s, least_s * (1 - 1e-9));
    if (least_s > 0) sum += step_s / least_s - 1;
  }
  EXPECT_LE(sum / cases(12), 0.002);
}

// Gradients of 100 elements a second apart from 1 s on, the last one first; due at once.
Job layers(const std::vector<std::string>& codecs) {
  Job job;
  for (size_t i = 0; i < codecs.size(); ++i) {
    const auto offset = static_cast<int64_t>(100 * i);
    job.profile.tensors.push_back({"t" + std::to_string(i), 100, DType::float32, offset});
    job.profile.need_s.push_back(0);
    job.profile.ready_s.push_back(static_cast<double>(codecs.size() - i));
  }
  job.network = {2, {{0, 0}}};
  job.options.codec_of = codecs;
  job.options.overlap = Overlap::backward;
  return job;
}

std::vector<std::pair<std::string, std::vector<Block>>> ops_of(const Job& job) {
  const Plan plan = make_plan("mergecomp", job.profile, job.network, job.options);
  std::vector<std::pair<std::string, std::vector<Block>>> out;
  for (const Op& op : plan.ops()) {
    EXPECT_TRUE(op.fence);
    out.emplace_back(op.codec, op.blocks);
  }
  return out;
}

using Ops = std::vector<std::pair<std::string, std::vector<Block>>>;

TEST(MergeComp, MergesWhatACommonConstantPaysFor) {
  Job job = layers({"fp16", "fp16", "fp16", "fp16"});
  // Coding by the byte alone: nothing is gained by waiting.
  CodecCost& cost = job.options.codec_costs.by_spec["fp16"];
  cost = {{0, 1e-3, 0}, {0, 0, 0}};  // 0.4 s each
  EXPECT_EQ(ops_of(job).back(), (Ops::value_type{"fp16", {{0, 100}}}));
  // 1.5 s for each encoding: one by one would end at 7; two of two, at 2-3.5 and 4-5.5.
  cost = {{1.5, 0, 1.5}, {0, 0, 0}};
  EXPECT_EQ(simulator_of(job).step_s(make_plan("mergecomp", job.profile, job.network, job.options)),
            5.5);
  EXPECT_EQ(simulator_of(job).step_s(grouped(job, ~0U)), 7);
}

TEST(MergeComp, GroupsOfSeveralCodecsAreAnOpForEach) {
  Job job = layers({"fp16", "none", "fp16", "none"});
  job.network = {2, {{10, 0}}};
  EXPECT_EQ(ops_of(job),
            (Ops{{"none", {{100, 200}, {300, 400}}}, {"fp16", {{0, 100}, {200, 300}}}}));
  job.options.codec_of.clear();
  EXPECT_EQ(ops_of(job), (Ops{{"none", {{0, 400}}}}));
}

TEST(MergeComp, ThousandsOfTensors) {
  std::mt19937 rng(35);
  for (bool coded : {false, true}) {
    Job job = random_coded_job(rng, 1500, coded);
    job.profile = random_chain(rng, 1500, 1e5);
    const Plan plan = make_plan("mergecomp", job.profile, job.network, job.options);
    Simulator simulator = simulator_of(job);
    EXPECT_LE(simulator.step_s(plan), simulator.step_s(grouped(job, 0)) * 1.02);
    EXPECT_LE(plan.ops().size(), coded ? 4 * 512 : 512);
  }
}

}  // namespace
}  // namespace usbyte
