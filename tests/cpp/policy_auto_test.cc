// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "policy/auto/batching.h"
#include "policy/auto/coarse.h"
#include "policy/auto/local_search.h"
#include "policy/auto/rivals.h"
#include "random_profile.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

double real(std::mt19937& rng, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(rng);
}

// Like a network: sizes of all magnitudes, backward in the reverse order of forward, twice as long.
Profile layers(std::mt19937& rng, int count) {
  Profile p;
  double now = 0;
  int64_t offset = 0;
  std::vector<double> forward_s;
  for (int i = 0; i < count; ++i) {
    const auto numel = static_cast<int64_t>(std::exp(real(rng, 0, std::log(3e7))));
    p.tensors.push_back({"t" + std::to_string(i), numel, DType::float32, offset});
    offset += numel;
    forward_s.push_back(real(rng, 0, 0.02));
    p.need_s.push_back(now);
    now += forward_s.back();
  }
  p.ready_s.resize(p.need_s.size());
  for (size_t i = p.need_s.size(); i-- > 0;) {
    now += 2 * forward_s[i];
    p.ready_s[i] = now;
  }
  p.update_s = real(rng, 0, 0.05) * now;
  p.step_s = now + p.update_s;
  return p;
}

// A byte takes so long that communication is `ratio` times the computation.
NetworkModel network_for(std::mt19937& rng, const Profile& p, double ratio, double alpha_s) {
  const double beta = ratio * p.step_s / static_cast<double>(p.bytes());
  NetworkModel network{4, {{alpha_s, beta, uniform(rng, 0, 1) ? alpha_s * real(rng, 0, 1) : 0}}};
  if (uniform(rng, 0, 1)) network.all_reduce.push_back({1.5 * alpha_s, 1.05 * beta});
  if (uniform(rng, 0, 1)) {
    network.reduce_scatter = {{0.6 * alpha_s, 0.45 * beta}};
    network.all_gather = {{0.6 * alpha_s, 0.5 * beta}};
  }
  network.concurrent = static_cast<int>(uniform(rng, 0, 3));
  if (uniform(rng, 0, 1)) network.busy_alpha_s = 8 * alpha_s;
  if (uniform(rng, 0, 1))
    network.one_shot = {uniform(rng, 0, 1 << 20), alpha_s, alpha_s / 4, 2 * alpha_s};
  return network;
}

// Least lateness over every way to cut the jobs into consecutive batches.
double brute_force(const std::vector<double>& length, const std::vector<double>& due,
                   double startup, double least) {
  const size_t n = length.size();
  double best = kNever;
  for (unsigned cuts = 0; cuts < 1U << (n - 1); ++cuts) {
    double now = 0, lateness = -kNever;
    for (size_t j = 0; j < n;) {
      const size_t first = j;
      double busy = startup;
      do {
        busy += length[j++];
      } while (j < n && !(cuts >> (j - 1) & 1U));
      now += std::max(busy, least);
      lateness = std::max(lateness, now - due[first]);
    }
    best = std::min(best, lateness);
  }
  return best;
}

// The lateness of the batches that it says.
double played(const Batching& got, const std::vector<double>& length,
              const std::vector<double>& due, double startup, double least) {
  double now = 0, lateness = -kNever;
  EXPECT_EQ(got.begins.front(), 0);
  for (size_t b = 0; b < got.begins.size(); ++b) {
    const auto first = static_cast<size_t>(got.begins[b]);
    const size_t end =
        b + 1 < got.begins.size() ? static_cast<size_t>(got.begins[b + 1]) : length.size();
    EXPECT_LT(first, end);
    double busy = startup;
    for (size_t j = first; j < end; ++j) busy += length[j];
    now += std::max(busy, least);
    lateness = std::max(lateness, now - due[first]);
  }
  return lateness;
}

TEST(Batching, EqualsBruteForce) {
  std::mt19937 rng(1);
  for (int i = 0; i < 5000; ++i) {
    const auto n = static_cast<size_t>(uniform(rng, 1, 9));
    std::vector<double> length(n), due(n);
    for (double& x : length) x = real(rng, 0, 3);
    for (double& x : due) x = real(rng, -5, 10);
    std::sort(due.begin(), due.end());
    const double startup = uniform(rng, 0, 3) ? real(rng, 0, 3) : 0;
    const double least = uniform(rng, 0, 1) ? startup + real(rng, 0, 4) : 0;
    const Batching got = batch_exactly(length, due, startup, least);
    EXPECT_NEAR(got.lateness_s, brute_force(length, due, startup, least), 1e-9);
    EXPECT_NEAR(played(got, length, due, startup, least), got.lateness_s, 1e-9);
  }
}

// By every first batch of every suffix, which takes n^2 of them; of equals the longest.
Batching one_by_one(const std::vector<double>& length, const std::vector<double>& due,
                    double startup, double least) {
  const size_t n = length.size();
  std::vector<double> best(n + 1, kNever);
  std::vector<size_t> next(n + 1, n);
  best[n] = -kNever;
  for (size_t j = n; j-- > 0;) {
    double sum = startup;
    for (size_t k = j + 1; k <= n; ++k) {
      sum += length[k - 1];
      const double busy = std::max(sum, least);
      const double lateness = std::max(best[k] + busy, busy - due[j]);
      if (lateness > best[j]) continue;
      best[j] = lateness;
      next[j] = k;
    }
  }
  Batching out{best[0], {}};
  for (size_t j = 0; j < n; j = next[j]) out.begins.push_back(static_cast<int>(j));
  return out;
}

TEST(Batching, OfManyJobsIsTheBest) {
  std::mt19937 rng(2);
  for (int i = 0; i < 600; ++i) {
    const auto n = static_cast<size_t>(uniform(rng, 1, 300));
    const bool whole = i % 2;  // in whole numbers nothing is rounded, and much is equal
    const auto some = [&](double low, double high) {
      return whole ? std::floor(real(rng, low, high + 1)) : real(rng, low, high);
    };
    const double scale = whole ? 3 : std::pow(10.0, real(rng, -3, 1));
    std::vector<double> length(n), due(n);
    for (double& x : length) x = uniform(rng, 0, 3) ? some(0, scale) : 0;
    for (double& x : due) x = uniform(rng, 0, 9) ? some(-5, whole ? 300 : 30) : kNever;
    std::sort(due.begin(), due.end());
    const double startup = uniform(rng, 0, 3) ? some(0, 3) : 0;
    const double least = uniform(rng, 0, 1) ? startup + some(0, 4) : 0;
    const Batching got = batch_exactly(length, due, startup, least);
    const Batching expected = one_by_one(length, due, startup, least);
    const double late = played(got, length, due, startup, least);
    if (whole || expected.lateness_s == -kNever) {
      EXPECT_EQ(got.lateness_s, expected.lateness_s);
      EXPECT_EQ(got.begins, expected.begins);
      EXPECT_EQ(late, expected.lateness_s);
    } else {
      EXPECT_NEAR(got.lateness_s, expected.lateness_s, 1e-9);
      EXPECT_NEAR(late, expected.lateness_s, 1e-9);
    }
  }
}

TEST(Batching, NoJobsNoBatches) { EXPECT_TRUE(batch_exactly({}, {}, 1).begins.empty()); }

TEST(Draft, WindowsAdmitSoManyOps) {
  const Plan layout("layout", {{"a", 100, DType::float32, 0}},
                    {{Collective::all_reduce, {{0, 100}}, 1, false}});
  Draft draft{{{{{90, 100}}}, {{{40, 90}}}, {{{0, 10}, {20, 40}}}, {{{10, 20}}}}, 2};
  const std::vector<double> due = {0};
  const auto windows = [&](const NetworkModel& network) {
    const Plan plan = build(draft, layout, {network, due});
    std::vector<int64_t> out;
    for (const Op& op : plan.ops()) {
      EXPECT_FALSE(op.fence);
      out.push_back(op.window_bytes);
    }
    return out;
  };
  EXPECT_EQ(windows({}), (std::vector<int64_t>{40, 240, 320, 160}));
  // The first and the last one beside any two.
  NetworkModel network;
  network.one_shot.most_bytes = 40;
  EXPECT_EQ(windows(network), (std::vector<int64_t>{40, 240, 360, 400}));
  draft.in_flight = 1;
  EXPECT_EQ(windows({}), (std::vector<int64_t>{40, 200, 120, 40}));
  EXPECT_EQ(windows(network), (std::vector<int64_t>{40, 240, 120, 160}));
  for (DraftOp& op : draft.ops) op.split = true;
  const Plan split = build(draft, layout, {network, due});
  EXPECT_EQ(split.ops().front().kind, Collective::reduce_scatter);
  EXPECT_EQ(split.ops().back().kind, Collective::all_gather);
}

TEST(Draft, GathersComeByDueDateAfterTheLastScatter) {
  const Plan layout("layout",
                    {{"a", 10, DType::float32, 0},
                     {"b", 10, DType::float32, 10},
                     {"c", 10, DType::float32, 20},
                     {"d", 10, DType::float32, 30}},
                    {{Collective::all_reduce, {{0, 40}}, 1, false}});
  const std::vector<double> due = {0, 1, 2, 3};
  const Draft draft{{{{{30, 40}}}, {{{10, 20}}, true}, {{{0, 10}}}, {{{20, 30}}}}, 1};
  const Plan plan = build(draft, layout, {NetworkModel{4, {{1, 1}}}, due});
  std::vector<std::pair<Collective, int64_t>> launched;
  for (const Op& op : plan.ops()) launched.emplace_back(op.kind, op.blocks.front().begin);
  EXPECT_EQ(launched, (std::vector<std::pair<Collective, int64_t>>{{Collective::all_reduce, 30},
                                                                   {Collective::reduce_scatter, 10},
                                                                   {Collective::all_reduce, 0},
                                                                   {Collective::all_gather, 10},
                                                                   {Collective::all_reduce, 20}}));
}

TEST(LocalSearch, NeverMakesItWorse) {
  std::mt19937 rng(2);
  for (int i = 0; i < cases(60); ++i) {
    const Profile p = random_profile(rng);
    NetworkModel network{4, {{static_cast<double>(uniform(rng, 0, 5)), 0.25}}, {}, {{1, 0.125}}};
    network.one_shot = {uniform(rng, 0, 40), 1, 0.25};
    Simulator simulator(p, network, Overlap::forward);
    const Plan layout = make_plan("wfbp", p, network);
    const std::vector<double> due = simulator.due_s();
    for (bool split : {false, true}) {
      Draft draft{{}, static_cast<int>(uniform(rng, 1, 3))};
      for (const Op& op : layout.ops()) draft.ops.push_back({op.blocks, split});
      const DraftCosts costs(network, due);
      const double before = simulator.lateness_s(build(draft, layout, costs));
      const double after = LocalSearch(simulator, layout, costs, 50000, -1e9, i % 2).improve(draft);
      EXPECT_LE(after, before);
      EXPECT_NEAR(simulator.lateness_s(build(draft, layout, costs)), after, 1e-12);
    }
  }
}

TEST(LocalSearch, SimplifiesWithinItsLimit) {
  std::mt19937 rng(5);
  int fewer = 0, kept_apart = 0;
  for (int i = 0; i < 60; ++i) {
    const Profile p = random_profile(rng);
    NetworkModel network{4, {{static_cast<double>(uniform(rng, 0, 5)), 0.25}}, {}, {{1, 0.125}}};
    network.one_shot = {uniform(rng, 0, 40), 1, 0.25};
    Simulator simulator(p, network, Overlap::forward);
    const Plan layout = make_plan("wfbp", p, network);
    const std::vector<double> due = simulator.due_s();
    const DraftCosts costs(network, due);
    const auto lateness_s = [&](const Draft& d) {
      return simulator.lateness_s(build(d, layout, costs));
    };
    Draft draft{{}, static_cast<int>(uniform(rng, 1, 3))};
    for (const Op& op : layout.ops()) draft.ops.push_back({op.blocks});
    LocalSearch search(simulator, layout, costs, 0, 0, true);

    const double limit = lateness_s(draft) + static_cast<double>(uniform(rng, 0, 10));
    Draft some = draft;
    search.simplify(some, limit - lateness_s(draft));
    EXPECT_LE(lateness_s(some), limit + 1e-9);
    EXPECT_LE(some.ops.size(), draft.ops.size());
    fewer += some.ops.size() < draft.ops.size();

    // Whatever it may cost, all are joined but shots with others.
    Draft all = draft;
    search.simplify(all, kNever);
    const auto shot = [&](const std::vector<Block>& blocks) {
      return network.one_shot.takes(Collective::all_reduce, layout.bytes({{}, blocks}));
    };
    for (size_t op = 0; op + 1 < all.ops.size(); ++op) {
      const auto &one = all.ops[op].blocks, &next = all.ops[op + 1].blocks;
      const bool of_one_dtype = layout.dtype(one.front()) == layout.dtype(next.front());
      EXPECT_FALSE(of_one_dtype && !shot(one) && !shot(next));
    }
    for (const auto& [before, _] : draft.ops) {
      for (const auto& [after, split] : all.ops) {
        EXPECT_FALSE(split);
        if (!shot(before) || shot(after)) continue;
        for (Block b : after) EXPECT_FALSE(b.begin <= before[0].begin && before[0].end <= b.end);
        ++kept_apart;
      }
    }
  }
  EXPECT_GT(kept_apart, 0);
  EXPECT_GT(fewer, 0);
}

// "first" is due at once and fits in one shot; whatever else goes before "last" makes that late.
TEST(LocalSearch, CutsOffWhatFitsInOneShot) {
  Profile p;
  p.tensors = {{"first", 16, DType::float32, 0},
               {"next", 3000, DType::float32, 16},
               {"last", 1000, DType::float32, 3016}};
  p.need_s = {0, 500, 50};
  p.ready_s = {900, 900, 900};
  p.step_s = 1000;
  NetworkModel network{4, {{100, 0.01}}};
  network.one_shot = {64, 1, 0.25};
  Simulator simulator(p, network, Overlap::forward);
  const Plan layout = make_plan("wfbp", p, network);
  const std::vector<double> due = simulator.due_s();
  Draft draft{{{{{0, 16}, {3016, 4016}}}, {{{16, 3016}}}}, 1};
  LocalSearch search(simulator, layout, {network, due}, 0, kNever, false);
  EXPECT_LE(search.improve(draft), 0);
  const std::vector<Block> first = {{0, 16}};
  EXPECT_TRUE(
      std::ranges::any_of(draft.ops, [&](const DraftOp& op) { return op.blocks == first; }));
}

// The first layer's few bytes are the last to be ready and the first to be due.
TEST(Auto, SendsWhatIsUrgentAndSmallInOneShot) {
  Profile p;
  p.tensors = {{"small", 16, DType::float32, 0},
               {"next", 1000, DType::float32, 16},
               {"large", 100000, DType::float32, 1016}};
  p.need_s = {0, 0.25, 0.5};
  p.ready_s = {2, 1.9, 1};
  p.step_s = 2;
  NetworkModel network{4, {{0.01, 1e-6}, {0.01, 1e-6}}, {}, {}, 2, 0.1};
  network.one_shot = {64, 0.005, 0.001};
  const Plan plan = make_plan("auto", p, network);
  const auto shot = std::find_if(plan.ops().begin(), plan.ops().end(), [&](const Op& op) {
    return network.one_shot.takes(op.kind, plan.bytes(op));
  });
  ASSERT_NE(shot, plan.ops().end());
  EXPECT_EQ(shot->blocks, (std::vector<Block>{{0, 16}}));
  Simulator simulator(p, network, Overlap::forward);
  EXPECT_NEAR(simulator.step_s(plan), 2.005, 1e-9);
}

// Sizes that a user may set: any for buckets, of those for which plans are searched else.
void draw_sizes(std::mt19937& rng, PolicyOptions& options) {
  const std::vector<int64_t>& sizes = tuned_sizes();
  options.bucket_bytes = static_cast<int64_t>(std::exp(real(rng, 0, std::log(1e9))));
  options.fusion_bytes = static_cast<int64_t>(std::exp(real(rng, 0, std::log(1e9))));
  const auto partition = uniform(rng, 0, static_cast<int64_t>(sizes.size()) - 1);
  options.partition_bytes = sizes[static_cast<size_t>(partition)];
  const auto credit = uniform(rng, partition, static_cast<int64_t>(sizes.size()) - 1);
  options.credit_bytes = sizes[static_cast<size_t>(credit)];
  options.unit_bytes = int64_t{64 << 10} << uniform(rng, 0, 9);
}

TEST(Auto, IsNeverWorseThanAnyOtherPolicyOfAnySize) {
  std::mt19937 rng(3);
  for (int i = 0; i < cases(40); ++i) {
    const Profile p = layers(rng, static_cast<int>(uniform(rng, 1, 40)));
    const NetworkModel network =
        network_for(rng, p, real(rng, 0.1, 3), uniform(rng, 0, 3) ? real(rng, 0, 0.02) : 0);
    PolicyOptions options;
    options.overlap = uniform(rng, 0, 3) ? Overlap::forward : Overlap::backward;
    options.sharded = options.overlap == Overlap::forward && uniform(rng, 0, 3) == 0;
    Simulator simulator(p, network, options.overlap, options.sharded);
    const double ours = simulator.step_s(make_plan("auto", p, network, options));
    EXPECT_GE(ours, simulator.bound_s() - 1e-9);
    for (int sizes = 0; sizes < 20; ++sizes) {
      for (const auto& [name, policy] : policies()) {
        if (options.sharded && !policy.shards) continue;
        if (name == "auto") continue;
        const double theirs = simulator.step_s(make_plan(name, p, network, options));
        EXPECT_LE(ours, theirs * (1 + 1e-9)) << name << " " << i;
      }
      draw_sizes(rng, options);
    }
  }
}

TEST(Auto, GathersForShardsAsManyAtATimeAsPay) {
  Profile p;
  std::vector<Op> each;
  for (int i = 0; i < 3; ++i) {
    p.tensors.push_back({"t" + std::to_string(i), 8, DType::float32, 8 * i});
    p.need_s.push_back(2 * i);
    p.ready_s.push_back(20 - 2 * i);
  }
  for (int i : {2, 1, 0}) each.push_back({Collective::reduce_scatter, {{8 * i, 8 * i + 8}}, 999});
  for (int i : {0, 1, 2}) each.push_back({Collective::all_gather, {{8 * i, 8 * i + 8}}, 999});
  const NetworkModel network{2, {{8, 0.25}, {8, 0.125}}, {}, {}, 2};
  PolicyOptions options;
  options.sharded = true;
  Simulator simulator(p, network, Overlap::forward, true);
  const double apart_s = simulator.step_s(Plan("each", p.tensors, each));
  EXPECT_LT(simulator.step_s(automatic(p, network, options)), apart_s);
}

TEST(Auto, ReachesTheBoundWithoutStartups) {
  std::mt19937 rng(4);
  for (int i = 0; i < cases(60); ++i) {
    const Profile p = layers(rng, static_cast<int>(uniform(rng, 1, 60)));
    const NetworkModel network{
        4, {{0, real(rng, 0.2, 3) * p.step_s / static_cast<double>(p.bytes())}}};
    Simulator simulator(p, network, Overlap::forward);
    EXPECT_LE(simulator.step_s(make_plan("auto", p, network)), 1.01 * simulator.bytes_bound_s());
  }
}

TEST(Auto, PlansJobsOfWhichOthersWouldMakeMillionsOfParts) {
  std::mt19937 rng(7);
  Profile p = layers(rng, 30);
  int64_t offset = 0;
  for (TensorSpec& t : p.tensors) {
    t.numel = 10'000'000'000;
    t.offset = offset;
    offset += t.numel;
  }
  const NetworkModel network{4, {{1e-5, p.step_s / static_cast<double>(p.bytes())}}};
  for (const char* name : {"p3", "bytescheduler"}) {
    PolicyOptions options;
    options.partition_bytes = 1 << 20;
    EXPECT_THROW(make_plan(name, p, network, options), UsageError);
  }
  Simulator simulator(p, network, Overlap::forward);
  EXPECT_LE(simulator.step_s(make_plan("auto", p, network)),
            simulator.step_s(make_plan("mgwfbp", p, network)));
}

// Blocks for a coarse job are blocks for the job, and nothing comes later there.
TEST(Coarse, PlansForItAreNoLaterForTheJobItself) {
  std::mt19937 rng(8);
  int fewer = 0;
  for (int i = 0; i < cases(40); ++i) {
    Profile p = layers(rng, static_cast<int>(uniform(rng, 1, 200)));
    p.update_s = 0;
    p.step_s = p.backward_end_s();
    const auto halves = static_cast<size_t>(uniform(rng, 0, 200));
    for (size_t t = halves; t < p.tensors.size(); ++t) p.tensors[t].dtype = DType::float16;
    const Profile job = coarse(p, uniform(rng, 1, 100));
    EXPECT_EQ(job.bytes(), p.bytes());
    fewer += job.tensors.size() < p.tensors.size();
    const NetworkModel network = network_for(rng, p, real(rng, 0.1, 3), real(rng, 0, 0.02));
    for (const Overlap overlap : {Overlap::backward, Overlap::forward}) {
      PolicyOptions options;
      options.overlap = overlap;
      Simulator of_job(job, network, overlap), of_all(p, network, overlap);
      for (const char* name : {"dcredit", "ddp", "dear_exact", "wfbp"}) {
        const Plan plan = make_plan(name, job, network, options);
        const Plan same = make_plan("ddp", p, network, options).with_ops(name, plan.ops());
        EXPECT_LE(of_all.step_s(same), of_job.step_s(plan) + 1e-9) << name;
      }
    }
  }
  EXPECT_GT(fewer, 0);
}

TEST(Coarse, JoinsWhatIsSmallAndNear) {
  Profile p;
  p.tensors = {{"a", 2, DType::float32, 0},  {"b", 3, DType::float32, 2},
               {"c", 2, DType::float32, 5},  {"used later", 1, DType::float32, 7},
               {"d", 1, DType::float32, 8},  {"e", 2, DType::float16, 9},
               {"f", 2, DType::float16, 11}, {"ready early", 2, DType::float16, 13}};
  p.need_s = {0, 0.1, 0.2, 0.9, 0.8, 0.8, 0.9, 0.9};
  p.ready_s = {2, 1.8, 1.7, 1.6, 1.7, 1.6, 1.5, 1};
  p.step_s = 2;
  const Profile job = coarse(p, 4);  // 12 bytes and 0.5 s at most
  std::vector<int64_t> numels;
  for (const TensorSpec& t : job.tensors) numels.push_back(t.numel);
  EXPECT_EQ(numels, (std::vector<int64_t>{2, 3, 2, 2, 4, 2}));
  EXPECT_EQ(job.need_s, (std::vector<double>{0, 0.1, 0.2, 0.8, 0.8, 0.9}));
  EXPECT_EQ(job.ready_s, (std::vector<double>{2, 1.8, 1.7, 1.7, 1.6, 1}));
  EXPECT_EQ(job.tensors[3].name, "used later");
  EXPECT_EQ(coarse(p, 1000).tensors, p.tensors);
}

TEST(Auto, IsNoWorseThanOthersWithThousandsOfTensors) {
  std::mt19937 rng(9);
  const Profile p = layers(rng, 1500);
  const NetworkModel network = network_for(rng, p, 1, 2e-5 * p.step_s);
  Simulator simulator(p, network, Overlap::forward);
  const double ours = simulator.step_s(make_plan("auto", p, network));
  for (const char* name : {"bytescheduler", "dcredit", "ddp", "dear_exact", "mgwfbp", "us-byte"}) {
    EXPECT_LE(ours, simulator.step_s(make_plan(name, p, network))) << name;
  }
}

TEST(Auto, StaysWithDdpWhereNothingIsToBeWon) {
  std::mt19937 rng(6);
  for (int i = 0; i < 20; ++i) {
    const Profile p = layers(rng, 30);
    const NetworkModel network{4, {{0, 0}}};
    EXPECT_EQ(make_plan("auto", p, network).ops(), make_plan("ddp", p, network).ops());
  }
}

TEST(CodedAuto, IsNeverWorseThanAnyOtherPolicyOfAnySize) {
  std::mt19937 rng(21);
  constexpr const char* kSpecs[] = {"none", "int8", "topk:0.01", "fp16", "powersgd:2"};
  int better = 0;
  for (int i = 0; i < cases(8); ++i) {
    Profile p = layers(rng, static_cast<int>(uniform(rng, 2, 12)));
    PolicyOptions options;
    const bool in_one_round = i % 2;  // which bytecomp can plan for
    const char* lone = kSpecs[uniform(rng, 1, 3)];
    for (TensorSpec& t : p.tensors) {
      t.rows = t.numel % 64 == 0 ? 64 : 1;
      options.codec_of.emplace_back(in_one_round ? lone : kSpecs[uniform(rng, 0, 4)]);
    }
    for (const char* spec : {"int8", "topk:0.01", "fp16", "powersgd:2"}) {
      const double beta = real(rng, 0, in_one_round ? 1e-8 : 1e-10);
      options.codec_costs.by_spec[spec] = {{1e-5, beta, 1e-5}, {1e-5, beta, 1e-5}};
    }
    const NetworkModel network = network_for(rng, p, real(rng, 0.2, 5), 1e-4);
    Simulator simulator(p, network, options.overlap, false, options.codec_costs);
    const double own_s = simulator.step_s(make_plan("auto", p, network, options));
    const double ddp_s = simulator.step_s(make_plan("ddp", p, network, options));
    for (int sizes = 0; sizes < 8; ++sizes) {
      for (const auto& [name, unused] : policies()) {
        if (name == "auto" || (name == "bytecomp" && !in_one_round)) continue;
        const double other_s = simulator.step_s(make_plan(name, p, network, options));
        EXPECT_LE(own_s, other_s * (1 + 1e-9)) << name << " " << i;
      }
      draw_sizes(rng, options);
    }
    better += own_s < 0.99 * ddp_s;
  }
  EXPECT_GT(better, 0);
}

TEST(CodedAuto, DoesWhatDdpDoesWhereAllIsHidden) {
  std::mt19937 rng(22);
  const Profile p = layers(rng, 10);
  PolicyOptions options;
  options.codec_of.assign(p.tensors.size(), "int8");
  options.codec_costs.by_spec["int8"] = {{0, 0, 0}, {0, 0, 0}};
  const NetworkModel network{4, {{0, 0}}};
  EXPECT_EQ(make_plan("auto", p, network, options).ops(),
            make_plan("ddp", p, network, options).ops());
}

}  // namespace
}  // namespace usbyte
