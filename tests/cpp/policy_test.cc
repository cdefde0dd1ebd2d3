// SPDX-License-Identifier: Apache-2.0
#include "usbyte/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "random_profile.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr int64_t kMB = 1 << 20;

Profile profile_of(const std::vector<int64_t>& numels) {
  Profile p;
  int64_t offset = 0;
  const double n = static_cast<double>(numels.size());
  for (size_t i = 0; i < numels.size(); ++i) {
    p.tensors.push_back({"t" + std::to_string(i), numels[i], DType::float32, offset});
    offset += numels[i];
    p.need_s.push_back(static_cast<double>(i));
    p.ready_s.push_back(2 * n - static_cast<double>(i));
  }
  return p;
}

std::vector<Block> blocks_of(const Plan& plan) {
  std::vector<Block> out;
  for (const Op& op : plan.ops()) out.insert(out.end(), op.blocks.begin(), op.blocks.end());
  return out;
}

TEST(Policies, ShardsNeedEverythingScatteredBeforeAGather) {
  const Profile p = profile_of({10, 20, 30});
  PolicyOptions options;
  options.sharded = true;
  EXPECT_EQ(sharding_policies(), (std::vector<std::string>{"auto", "dear", "dear_exact"}));
  for (const auto& [name, policy] : policies()) {
    if (policy.shards) {
      EXPECT_EQ(make_plan(name, p, {}, options).policy(), name);
    } else if (name == "pipedap") {
      // Tensors are seconds apart, so that it gathers in backward.
      EXPECT_THROW(make_plan(name, p, {4, {{0.01, 1e-6}}}, options), UsageError);
    } else {
      EXPECT_THROW(make_plan(name, p, {}, options), UsageError) << name;
    }
  }
}

TEST(Policies, EveryPolicyTilesEveryProfile) {  // Plan's constructor checks the tiling
  std::mt19937 rng(3);
  for (int i = 0; i < cases(120); ++i) {
    const Profile p = random_profile(rng);
    const NetworkModel network{4, {{static_cast<double>(uniform(rng, 0, 3)), 0.01}}};
    PolicyOptions options;
    options.bucket_bytes = uniform(rng, 1, 400);
    options.first_bucket_bytes = uniform(rng, 1, 100);
    options.partition_bytes = uniform(rng, 1, 100);
    options.credit_bytes = uniform(rng, 1, 200);
    for (const auto& [name, policy] : policies()) {
      const Plan plan = make_plan(name, p, network, options);
      EXPECT_EQ(plan.policy(), name);
      EXPECT_EQ(plan.tensors(), p.tensors);
    }
  }
}

TEST(Policies, UnknownNamesAndBadSizesAreErrors) {
  const Profile p = profile_of({1});
  EXPECT_THROW(make_plan("best", p, {}), UsageError);
  PolicyOptions zero;
  zero.credit_bytes = 0;
  EXPECT_THROW(make_plan("ddp", p, {}, zero), UsageError);
  PolicyOptions sharded;
  sharded.sharded = true;
  EXPECT_THROW(make_plan("wfbp", p, {}, sharded), UsageError);
}

TEST(Policies, AFormerNameIsAcceptedAndNeverShown) {
  const Profile p = profile_of({10, 20, 30});
  EXPECT_EQ(policies().count("usbyte"), 0u);
  const Plan plan = make_plan("us-byte", p, {});
  EXPECT_EQ(plan.policy(), "us-byte");
  EXPECT_EQ(make_plan("usbyte", p, {}), plan);
  EXPECT_EQ(Plan("usbyte", plan.tensors(), plan.ops()), plan);
  std::string json = plan.to_json();
  EXPECT_EQ(json.find("\"usbyte\""), std::string::npos);
  json.replace(json.find("us-byte\""), 8, "usbyte\"");
  EXPECT_EQ(Plan::from_json(json).hash(), plan.hash());
}

TEST(Policies, SparseTensorsArePlannedByOthers) {
  Profile p = profile_of({10, 40});
  p.tensors[1].numel = 0;
  p.tensors[1].rows = 10;
  p.tensors[1].width = 4;
  for (const auto& [name, policy] : policies()) {
    try {
      make_plan(name, p, {});
      ADD_FAILURE() << name;
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find("'t1' is sparse"), std::string::npos) << e.what();
    }
  }
}

TEST(Policies, CodecsReachEveryPlan) {
  std::mt19937 rng(4);
  constexpr const char* kSpecs[] = {"none", "fp16", "topk:1e-2"};
  for (int i = 0; i < cases(40); ++i) {
    const Profile p = random_profile(rng);
    const NetworkModel network{4, {{static_cast<double>(uniform(rng, 0, 3)), 0.01}}};
    PolicyOptions options;
    std::vector<std::string> expected;
    for (const TensorSpec& t : p.tensors) {
      options.codec_of.emplace_back(is_floating(t.dtype) ? kSpecs[uniform(rng, 0, 2)] : "none");
      expected.push_back(options.codec_of.back() == "topk:1e-2" ? "topk:0.01"
                                                                : options.codec_of.back());
    }
    for (const auto& [name, unused] : policies()) {
      if (name == "auto" && i > 2) continue;
      const Plan plan = make_plan(name, p, network, options);
      EXPECT_EQ(plan.policy(), name);
      for (const Op& op : plan.ops()) {
        const bool leaves_alone = name == "bytecomp" || name == "auto";
        if (leaves_alone && op.codec == "none") continue;  // where it does not pay
        for (int t : plan.tensors_of(op)) {
          EXPECT_EQ(op.codec, expected[static_cast<size_t>(t)]) << name;
        }
      }
    }
    options.codec_of.assign(p.tensors.size(), "none");
    EXPECT_EQ(make_plan("pipedap", p, network, options), make_plan("pipedap", p, network));
  }
}

TEST(Policies, CodecsThatCannotBeAreErrors) {
  Profile p = profile_of({10, 20});
  const auto error = [&](const PolicyOptions& options) -> std::string {
    try {
      make_plan("wfbp", p, {}, options);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "none";
  };
  const auto with = [](std::vector<std::string> codecs) {
    PolicyOptions options;
    options.codec_of = std::move(codecs);
    return options;
  };
  EXPECT_EQ(error(with({"fp16", "none"})), "none");
  EXPECT_NE(error(with({"fp16"})).find("1 codecs for 2 tensors"), std::string::npos);
  EXPECT_NE(error(with({"fp16", "zip"})).find("'zip' is unknown"), std::string::npos);
  PolicyOptions options = with({"fp16", "none"});
  options.codec_costs.by_spec["int8"] = {};
  EXPECT_NE(error(options).find("usbyte probe --codecs fp16,int8"), std::string::npos);
  options = with({"none", "none"});
  options.codec_costs.by_spec["int8"] = {};
  EXPECT_EQ(error(options), "none");
  options = with({"fp16", "none"});
  options.sharded = true;
  EXPECT_NE(error(options).find("sharded"), std::string::npos);
  p.tensors[1].dtype = DType::int32;
  EXPECT_NE(error(with({"fp16", "fp16"})).find("'" + p.tensors[1].name + "', which is of int32"),
            std::string::npos);
}

TEST(Wfbp, OneFencedOpForEachTensorInBackwardOrder) {
  const Plan plan = make_plan("wfbp", profile_of({5, 6, 7}), {});
  EXPECT_EQ(blocks_of(plan), (std::vector<Block>{{11, 18}, {5, 11}, {0, 5}}));
  for (const Op& op : plan.ops()) EXPECT_TRUE(op.fence);
}

TEST(Ddp, SmallFirstBucketThenFullOnesFromTheEndOfTheBuffer) {
  PolicyOptions options;
  options.first_bucket_bytes = kMB;
  options.bucket_bytes = 4 * kMB;
  const int64_t m = kMB / 4;  // elements of 1 MiB
  const Plan plan =
      make_plan("ddp", profile_of({m, 2 * m, 3 * m, 3 * m, m / 2, m / 2}), {}, options);
  // A bucket closes when it has reached its size, so it may exceed it by less than its last tensor.
  EXPECT_EQ(blocks_of(plan), (std::vector<Block>{{9 * m, 10 * m}, {3 * m, 9 * m}, {0, 3 * m}}));
}

TEST(Ddp, TheFirstBucketOfEachTypeIsSmall) {
  PolicyOptions options;
  options.first_bucket_bytes = 40;
  options.bucket_bytes = 120;
  Profile p = profile_of({20, 20, 10, 10, 10, 10});
  for (size_t i : {0, 1, 2}) p.tensors[i].dtype = DType::bfloat16;
  // Of float32 one tensor and then three; of bfloat16 two and then one.
  EXPECT_EQ(blocks_of(make_plan("ddp", p, {}, options)),
            (std::vector<Block>{{70, 80}, {50, 70}, {20, 50}, {0, 20}}));
}

TEST(Ddp, BucketsAreLaunchedAsTheyFill) {
  Profile p = profile_of({10, 10, 10});
  p.ready_s = {1, 5, 3};
  PolicyOptions options;
  options.first_bucket_bytes = options.bucket_bytes = 1;
  EXPECT_EQ(blocks_of(make_plan("ddp", p, {}, options)),
            (std::vector<Block>{{0, 10}, {20, 30}, {10, 20}}));
}

TEST(ByteScheduler, PartsAreNearEqualAndNotLargerThanThePartition) {
  PolicyOptions options;
  options.partition_bytes = 40;
  options.credit_bytes = 1;
  const Plan plan = make_plan("bytescheduler", profile_of({25}), {1, {{1, 1}}}, options);
  EXPECT_EQ(blocks_of(plan), (std::vector<Block>{{0, 8}, {8, 16}, {16, 25}}));
}

TEST(ByteScheduler, NearestInputOvertakesWhatStillWaits) {
  // Tensor 1 (3 parts) is ready at 0 and its first part takes until 10; tensor 0 is ready at 5, so
  // it goes next.
  Profile p = profile_of({10, 30});
  p.ready_s = {5, 0};
  PolicyOptions options;
  options.partition_bytes = options.credit_bytes = 40;
  const Plan plan = make_plan("bytescheduler", p, {2, {{0, 0.25}}}, options);
  EXPECT_EQ(blocks_of(plan), (std::vector<Block>{{10, 20}, {0, 10}, {20, 30}, {30, 40}}));
  for (const Op& op : plan.ops()) EXPECT_EQ(op.window_bytes, 40);
  // With credit for two parts, two are under way before tensor 0 is ready.
  options.credit_bytes = 80;
  EXPECT_EQ(blocks_of(make_plan("bytescheduler", p, {2, {{0, 0.25}}}, options)),
            (std::vector<Block>{{10, 20}, {20, 30}, {0, 10}, {30, 40}}));
}

TEST(ByteScheduler, MorePartsThanAnyNetworkTakesAreRefused) {
  PolicyOptions options;
  options.partition_bytes = 1;
  const Profile p = profile_of({2'000'000});
  EXPECT_THROW(make_plan("bytescheduler", p, {2, {{1, 1}}}, options), UsageError);
}

TEST(ByteScheduler, WithoutAProfileOfTimesItIsForwardOrder) {
  Profile p = profile_of({10, 10, 10});
  p.ready_s = {7, 7, 7};
  EXPECT_EQ(blocks_of(make_plan("bytescheduler", p, {2, {{1, 1}}})),
            (std::vector<Block>{{0, 10}, {10, 20}, {20, 30}}));
}

TEST(Profile, JsonRoundTripsAndBadProfilesAreErrors) {
  std::mt19937 rng(5);
  const Profile p = random_profile(rng);
  const Profile again = Profile::from_json(p.to_json());
  EXPECT_EQ(again.tensors, p.tensors);
  EXPECT_EQ(again.need_s, p.need_s);
  EXPECT_EQ(again.ready_s, p.ready_s);
  Profile bad = p;
  bad.ready_s[0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(bad.validate(), PlanError);
  bad = p;
  bad.need_s.pop_back();
  EXPECT_THROW(bad.validate(), PlanError);
  EXPECT_THROW(Profile::from_json("{}"), PlanError);
}

}  // namespace
}  // namespace usbyte
