// SPDX-License-Identifier: Apache-2.0
#include "policy/transforms/routing.h"

#include <gtest/gtest.h>

#include <limits>

#include "meshes.h"
#include "random_job.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr auto kWhole = Collective::all_reduce;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr int64_t kMega = 1'000'000;

// Two hosts of two: what is inside has half the speed of what is between.
Topology slow_inside(double latency_s = 0) {
  return {{{"inside", 2, 1e7, latency_s}, {"between", 2, 2e7, latency_s}}};
}

// A ring through all of them goes at the speed of the slowest link.
NetworkModel network_of(const Topology& topology) {
  double slowest = topology.dimensions.front().bytes_per_s;
  for (const Dimension& d : topology.dimensions) slowest = std::min(slowest, d.bytes_per_s);
  NetworkModel out = NetworkModel::ring(topology.ranks(), 0, slowest);
  out.topology = topology;
  return out;
}

std::vector<TensorSpec> one_tensor(int64_t numel) {
  return {{"w", numel, DType::float32, 0, 1, 0}};
}

Plan one_op(int64_t numel, std::optional<MeshSchedule> route = {}, std::string codec = "none") {
  Op op{kWhole, {{0, numel}}, kUnlimited, false, std::move(codec)};
  op.route = std::move(route);
  return Plan("test", one_tensor(numel), {op});
}

TEST(Routes, PlansHoldThemAndTellThemApart) {
  const MeshSchedule route = best_route(slow_inside(), 4 * kMega).schedule;
  const Plan plan = one_op(kMega, route), flat = one_op(kMega);
  EXPECT_EQ(Plan::from_json(plan.to_json()), plan);
  EXPECT_EQ(Plan::from_json(plan.to_json()).ops()[0].route, route);
  EXPECT_NE(plan.hash(), flat.hash());
  EXPECT_FALSE(plan == flat);
  MeshSchedule other = route;
  std::swap(other.order[0].front(), other.order[0].back());
  EXPECT_NE(one_op(kMega, other).hash(), plan.hash());
  EXPECT_NE(plan.describe(0).find("routed"), std::string::npos);
}

TEST(Routes, PlansRefuseWhatCannotBeRouted) {
  const MeshSchedule route = best_route(slow_inside(), 4 * kMega).schedule;
  EXPECT_THROW(one_op(kMega, route, "fp16"), PlanError);
  EXPECT_THROW(one_op(kMega, MeshSchedule{}), PlanError);
  MeshSchedule scatters = route;
  scatters.kind = Collective::reduce_scatter;
  EXPECT_THROW(one_op(kMega, scatters), PlanError);
  Op scatter{Collective::reduce_scatter, {{0, kMega}}, kUnlimited};
  Op gather{Collective::all_gather, {{0, kMega}}, kUnlimited};
  EXPECT_NO_THROW(Plan("test", one_tensor(kMega), {scatter, gather}));
  scatter.route = route;
  EXPECT_THROW(Plan("test", one_tensor(kMega), {scatter, gather}), PlanError);
  std::string text = one_op(kMega, route).to_json();
  text.insert(text.find("\"routes\":[[") + 11, "-1,");
  EXPECT_THROW(Plan::from_json(text), PlanError);
}

TEST(Routes, CodecsTakeThemAway) {
  const MeshSchedule route = best_route(slow_inside(), 4 * kMega).schedule;
  const std::vector<std::string> none = {"none"}, half = {"fp16"};
  EXPECT_EQ(with_codecs(one_op(kMega, route), none).ops()[0].route, route);
  EXPECT_FALSE(with_codecs(one_op(kMega, route), half).ops()[0].route);
}

// With one phase at a time, the orders that the simulator found leave it nothing to decide.
TEST(Routes, CarryingOutAScheduleTakesWhatFindingItTook) {
  std::mt19937 rng(1);
  for (int i = 0; i < cases(300); ++i) {
    const Topology topology = random_topology(rng, 1, 1, true);
    MeshCollective collective{kWhole, uniform_real(rng, 0, 1e9), {}, {}, 0, {}};
    for (int64_t c = uniform(rng, 1, 20); c > 0; --c) {
      collective.routes.push_back(random_route(topology, rng));
    }
    const MeshQueue queue = static_cast<MeshQueue>(uniform(rng, 0, 1));
    const MeshRun run = simulate_mesh(topology, {collective}, {queue});
    const MeshSchedule schedule = run.schedule(collective);
    const double one_s = simulate_schedule(topology, schedule, collective.bytes, 1);
    EXPECT_NEAR(one_s, run.finish_s, 1e-9 * run.finish_s);
    double busiest_s = 0;
    for (const DimensionUse& use : run.dimensions) busiest_s = std::max(busiest_s, use.busy_s);
    const double two_s = simulate_schedule(topology, schedule, collective.bytes, 2);
    EXPECT_GE(two_s, busiest_s * (1 - 1e-9));
    EXPECT_GE(two_s, ideal_s(topology, kWhole, collective.bytes) * (1 - 1e-9));
  }
}

TEST(Routes, PhasesInHandShareADimension) {
  // Each of two chunks of 20 bytes sends 10 of them down and 10 up, at 10 bytes a second.
  const Topology one{{{"a", 2, 10, 1}}};
  MeshSchedule schedule{kWhole, {{0}, {0}}, {{{0, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0, 1, 1}}}};
  EXPECT_DOUBLE_EQ(simulate_schedule(one, schedule, 40, 1), 8);  // 4 times 1 s + 1 s
  EXPECT_DOUBLE_EQ(simulate_schedule(one, schedule, 40, 2), 6);  // twice 1 s + 2 s
  EXPECT_THROW(simulate_schedule(one, schedule, 40, 0), UsageError);
  EXPECT_THROW(simulate_schedule(one, schedule, -1), UsageError);
}

TEST(Routes, SchedulesOfOtherTopologiesAreRefused) {
  const MeshSchedule route = best_route(slow_inside(), 4 * kMega).schedule;
  const Topology one{{{"a", 4, 1e9}}};
  EXPECT_THROW(simulate_schedule(one, route, 1), UsageError);
}

// Inner first alone keeps the slow dimension busy with all bytes, outer first with half of them.
TEST(Routes, TheBestRouteIsTwiceAsFastWhereTheInnerDimensionIsHalfAsFast) {
  const MeshChoice best = best_route(slow_inside(), 64 * kMega);
  EXPECT_GT(best.fixed_s / best.seconds, 1.9);
  EXPECT_LE(best.ideal_s, best.seconds);
  EXPECT_NEAR(best.seconds, best.ideal_s, 0.1 * best.ideal_s);
}

TEST(Routes, StartupsMakeChunksFewer) {
  const size_t many = best_route(slow_inside(), 64 * kMega).schedule.routes.size();
  const size_t few = best_route(slow_inside(0.1), 64 * kMega).schedule.routes.size();
  EXPECT_LT(few, many);
  EXPECT_EQ(best_route(slow_inside(), 4).schedule.routes.size(), 1U);
}

TEST(Routes, OnlyOpsThatGainHaveThem) {
  NetworkModel network = network_of(slow_inside());
  const auto route_of = [&](const Plan& plan) { return with_routes(plan, network).ops()[0].route; };
  EXPECT_TRUE(route_of(one_op(16 * kMega)));
  EXPECT_FALSE(route_of(one_op(16 * kMega, {}, "fp16")));
  network.all_reduce = {{0, 1e-12}};  // nothing is as fast as going past the dimensions
  EXPECT_FALSE(route_of(one_op(16 * kMega)));
  network.all_reduce = {{1, 1e-3}};
  EXPECT_TRUE(route_of(one_op(1)));
  network.one_shot = {16, 0, 0, 0};
  EXPECT_FALSE(route_of(one_op(1)));
  network.topology.reset();
  EXPECT_FALSE(route_of(one_op(16 * kMega)));
  network.topology = Topology{{{"one", 1, 1}, {"all", 4, 1e12}}};
  EXPECT_FALSE(route_of(one_op(16 * kMega)));
}

TEST(Routes, AStepWithARoutedOpTakesWhatItsScheduleTakes) {
  const NetworkModel network = network_of(slow_inside(1e-3));
  Profile profile;
  profile.tensors = one_tensor(4 * kMega);
  profile.need_s = {0};
  profile.ready_s = {2};
  const Plan plan = with_routes(one_op(4 * kMega), network);
  ASSERT_TRUE(plan.ops()[0].route);
  Simulator simulator(profile, network, Overlap::backward);
  const double seconds = simulate_schedule(*network.topology, *plan.ops()[0].route, 16.0 * kMega);
  EXPECT_NEAR(simulator.step_s(plan), 2 + seconds, 1e-9);
  NetworkModel flat = network;
  flat.topology.reset();
  Simulator knows_nothing(profile, flat, Overlap::backward);
  EXPECT_THROW(knows_nothing.step_s(plan), UsageError);
}

TEST(Routes, ThemisIsDdpWithRoutes) {
  std::mt19937 rng(2);
  const Profile profile = random_chain(rng, 30, 1e7);
  NetworkModel network = network_of(slow_inside(1e-4));
  const Plan routed = make_plan("themis", profile, network),
             plain = make_plan("ddp", profile, network);
  ASSERT_EQ(routed.ops().size(), plain.ops().size());
  int with = 0;
  for (size_t i = 0; i < plain.ops().size(); ++i) {
    EXPECT_EQ(routed.ops()[i].blocks, plain.ops()[i].blocks);
    with += routed.ops()[i].route.has_value();
  }
  EXPECT_GT(with, 0);
  network.topology.reset();
  EXPECT_EQ(make_plan("themis", profile, network).ops(), plain.ops());
}

TEST(Routes, AutoIsNeverWorseThanAnyOtherPolicyAndNothingBeatsTheBound) {
  std::mt19937 rng(3);
  for (int i = 0; i < cases(20); ++i) {
    const Profile profile = random_chain(rng, uniform(rng, 1, 20), 1e7);
    Topology topology = random_topology(rng, 2, 2);
    for (Dimension& d : topology.dimensions) d.bytes_per_s /= 10;
    NetworkModel network = network_of(topology);
    PolicyOptions options;
    options.overlap = uniform(rng, 0, 1) ? Overlap::forward : Overlap::backward;
    Simulator simulator(profile, network, options.overlap);
    const double ours = simulator.step_s(make_plan("auto", profile, network, options));
    for (const int64_t bucket_bytes : {25 << 20, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20}) {
      options.bucket_bytes = bucket_bytes;
      for (const auto& [name, unused] : policies()) {
        const double step_s = simulator.step_s(make_plan(name, profile, network, options));
        EXPECT_GE(step_s, simulator.bound_s() * (1 - 1e-9)) << name;
        EXPECT_LE(ours, step_s * (1 + 1e-9)) << name;
      }
    }
  }
}

TEST(Routes, NetworksWithDimensionsTravelAsText) {
  const NetworkModel network = network_of(slow_inside(1e-4));
  EXPECT_EQ(NetworkModel::from_json(network.to_json()), network);
  NetworkModel flat = network;
  flat.topology.reset();
  EXPECT_EQ(flat.to_json().find("topology"), std::string::npos);
  NetworkModel five = network;
  five.ranks = 5;
  EXPECT_THROW(five.validate(), UsageError);
  const NetworkModel slower = network.scaled(2, 4);
  EXPECT_EQ(slower.topology->dimensions[0].latency_s, 2e-4);
  EXPECT_EQ(slower.topology->dimensions[1].bytes_per_s, 5e6);
  EXPECT_FALSE(network.scaled(1, 0).topology);
}

}  // namespace
}  // namespace usbyte
