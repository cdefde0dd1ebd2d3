// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "random_job.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

PolicyOptions random_options(std::mt19937& rng, const Profile& p) {
  PolicyOptions options;
  const int64_t whole = p.bytes();
  const auto size = [&](int64_t most_parts) {
    const double least = 1 + static_cast<double>(whole / most_parts);
    return static_cast<int64_t>(
        std::exp(uniform_real(rng, std::log(least), std::log(2 * static_cast<double>(whole) + 2))));
  };
  options.overlap = uniform(rng, 0, 2) ? Overlap::forward : Overlap::backward;
  options.bucket_bytes = size(whole);
  options.first_bucket_bytes = size(whole);
  options.partition_bytes = size(2000);
  options.credit_bytes = size(whole);
  options.unit_bytes = size(whole);
  options.fusion_bytes = size(whole);
  return options;
}

// Plan's constructor checks the tiling.
void expect_sound(const std::string& policy, const Profile& p, const NetworkModel& network,
                  const PolicyOptions& options) {
  const Plan plan = make_plan(policy, p, network, options);
  EXPECT_EQ(plan.policy(), policy);
  Simulator simulator(p, network, options.overlap);
  const double step_s = simulator.step_s(plan), bound_s = simulator.bound_s();
  ASSERT_TRUE(std::isfinite(step_s)) << policy;
  EXPECT_GE(step_s, bound_s * (1 - 1e-9)) << policy;
  EXPECT_GE(bound_s, simulator.bytes_bound_s());
}

TEST(PolicyProperties, PlansTileAndNeverBeatTheBound) {
  std::mt19937 rng(11);
  for (int i = 0; i < cases(200); ++i) {
    const double max_numel = std::pow(10.0, uniform_real(rng, 0, 9));
    const Profile p = random_job(rng, uniform(rng, 1, 60), max_numel);
    const NetworkModel network = random_network(rng);
    const PolicyOptions options = random_options(rng, p);
    for (const auto& [name, unused] : policies()) expect_sound(name, p, network, options);
  }
}

TEST(PolicyProperties, ThousandsOfTensors) {
  std::mt19937 rng(12);
  for (double max_numel : {1.0, 1e6, 1e9}) {
    const Profile p = random_job(rng, 2000, max_numel);
    const NetworkModel network = random_network(rng);
    for (const auto& [name, unused] : policies()) {
      if (name == "p3" && max_numel > 1e6) continue;  // millions of slices
      expect_sound(name, p, network, random_options(rng, p));
    }
  }
}

TEST(PolicyProperties, ALargestTensorAloneAndNoTensorAtAll) {
  Profile p;
  for (const auto& [name, unused] : policies()) {
    EXPECT_TRUE(make_plan(name, p, {}).ops().empty()) << name;
  }
  p.tensors = {{"t", 1'000'000'000, DType::float64, 0}};
  p.need_s = p.ready_s = {0};
  PolicyOptions options;
  options.unit_bytes = 1;
  for (const auto& [name, unused] : policies()) {
    for (const AlphaBeta cost : {AlphaBeta{}, AlphaBeta{1e-3, 1e-9}, AlphaBeta{0, 1e-300}}) {
      expect_sound(name, p, {4, {cost}}, options);
    }
  }
}

TEST(PolicyProperties, SizesMustBePositive) {
  const Profile p{{{"t", 1, DType::float32, 0}}, {0}, {0}};
  for (int64_t PolicyOptions::* field :
       {&PolicyOptions::unit_bytes, &PolicyOptions::fusion_bytes}) {
    for (int64_t bytes : {0, -1}) {
      PolicyOptions options;
      options.*field = bytes;
      EXPECT_THROW(make_plan("wfbp", p, {}, options), UsageError);
    }
  }
}

}  // namespace
}  // namespace usbyte
