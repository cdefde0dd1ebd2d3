// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "policy/baselines/us_byte.h"
#include "random_job.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

AlphaBeta random_cost(std::mt19937& rng) {
  const auto some = [&](double most) {
    return uniform(rng, 0, 5) ? std::exp(uniform_real(rng, std::log(most / 1e2), std::log(most)))
                              : 0;
  };
  return {some(0.1), some(1e-5)};
}

PolicyOptions units(int64_t bytes) {
  PolicyOptions options;
  options.unit_bytes = bytes;
  return options;
}

UsByteSchedule both_phases(const UnitJob& job, std::span<const int> order) {
  UsByteSchedule schedule = us_byte_phase1(job, order);
  us_byte_phase2(job, schedule);
  return schedule;
}

struct Planned {
  int tensor;
  int64_t bytes;
  bool operator==(const Planned&) const = default;
};

std::vector<Planned> planned(const UsByteSchedule& schedule) {
  std::vector<Planned> out;
  for (const Send& s : schedule.sends) out.push_back({s.slice.tensor, s.slice.bytes()});
  return out;
}

// Phase 1 as published, unit by unit, for a chain of layers; p1[l] is the priority of layer l.
std::vector<Planned> phase1_as_published(const UnitJob& job, const std::vector<int>& p1) {
  const std::vector<double>& ready_s = job.profile->ready_s;
  std::vector<int64_t> left(ready_s.size(), 0);
  std::vector<Planned> ops;
  double channel_s = ready_s.back();
  left.back() = job.bytes.back();
  for (size_t l = ready_s.size() - 1; l-- > 0;) {
    while (channel_s < ready_s[l]) {
      size_t j = left.size();
      for (size_t i = 0; i < left.size(); ++i) {
        if (left[i] > 0 && (j == left.size() || p1[i] < p1[j])) j = i;
      }
      if (j == left.size()) break;
      const bool extends = !ops.empty() && ops.back().tensor == static_cast<int>(j);
      if (!extends) {
        ops.push_back({static_cast<int>(j), 0});
        channel_s += job.cost.alpha_s;
      }
      do {
        const int64_t unit = std::min(left[j], job.unit_bytes[j]);
        left[j] -= unit;
        ops.back().bytes += unit;
        channel_s += job.cost.beta_s_per_byte * static_cast<double>(unit);
      } while (left[j] > 0 && channel_s < ready_s[l]);
    }
    channel_s = std::max(channel_s, ready_s[l]);
    left[l] = job.bytes[l];
  }
  return ops;
}

TEST(UsByte, Phase1IsAsPublished) {
  std::mt19937 rng(41);
  size_t split = 0;
  for (int i = 0; i < 3000; ++i) {
    const Profile p = random_chain(rng, uniform(rng, 1, 12), 1e5);
    const UnitJob job(p, {4, {random_cost(rng)}}, units(uniform(rng, 1000, 20'000)));
    std::vector<int> order = job.forward;
    if (i % 2) std::shuffle(order.begin(), order.end(), rng);
    std::vector<int> p1(order.size());
    for (size_t k = 0; k < order.size(); ++k)
      p1[static_cast<size_t>(order[k])] = static_cast<int>(k);
    const std::vector<Planned> ops = planned(us_byte_phase1(job, order));
    ASSERT_EQ(ops, phase1_as_published(job, p1)) << i;
    for (const Planned& op : ops) split += op.bytes < job.bytes[static_cast<size_t>(op.tensor)];
  }
  EXPECT_GT(split, 1000u);
}

TEST(UsByte, NoByteIsLostAndTheChannelNeverGoesBack) {
  std::mt19937 rng(42);
  for (int i = 0; i < 2000; ++i) {
    const Profile p = random_job(rng, uniform(rng, 1, 30), std::pow(10, uniform_real(rng, 0, 9)));
    const UnitJob job(p, random_network(rng), units(uniform(rng, 1, 1 << 20)));
    std::vector<int> order = job.forward;
    std::shuffle(order.begin(), order.end(), rng);
    UsByteSchedule schedule = us_byte_phase1(job, order);
    for (bool after : {false, true}) {
      std::vector<int64_t> sent(order.size());
      double free_s = 0;
      for (const Send& s : schedule.sends) {
        const size_t t = static_cast<size_t>(s.slice.tensor);
        EXPECT_EQ(s.slice.begin, sent[t]);
        EXPECT_GT(s.slice.end, s.slice.begin);
        sent[t] = s.slice.end;
        EXPECT_GE(s.start_s, std::max(free_s, p.ready_s[t]));
        EXPECT_NEAR(s.end_s - s.start_s, job.cost.time_s(s.slice.bytes()), 1e-9 * s.end_s);
        free_s = s.end_s;
      }
      for (size_t t = 0; t < sent.size(); ++t) {
        EXPECT_EQ(sent[t] + schedule.rest[t], job.bytes[t]);
        EXPECT_TRUE(!after || schedule.rest[t] == 0);
      }
      EXPECT_GE(schedule.channel_s, std::max(free_s, p.backward_end_s()));
      us_byte_phase2(job, schedule);
    }
  }
}

TEST(UsByte, Phase2IsTheBestOrderOfWhatIsLeft) {
  std::mt19937 rng(43);
  int decided = 0;
  for (int i = 0; i < 3000; ++i) {
    const Profile p = random_job(rng, uniform(rng, 1, 6), 1e6);
    const UnitJob job(p, {4, {random_cost(rng)}}, units(1 << 14));
    const UsByteSchedule phase1 = us_byte_phase1(job, job.forward);
    std::vector<size_t> left;
    for (size_t t = 0; t < p.tensors.size(); ++t) {
      if (phase1.rest[t] > 0) left.push_back(t);
    }
    double least_s = std::numeric_limits<double>::infinity(), most_s = 0;
    do {
      double now = phase1.channel_s, delay_s = phase1.delay_s;
      for (size_t t : left) {
        now += job.cost.time_s(phase1.rest[t]);
        delay_s = std::max(delay_s, now - job.due_s[t]);
      }
      least_s = std::min(least_s, delay_s);
      most_s = std::max(most_s, delay_s);
    } while (std::next_permutation(left.begin(), left.end()));
    UsByteSchedule schedule = phase1;
    us_byte_phase2(job, schedule);
    EXPECT_NEAR(schedule.delay_s, least_s, 1e-9 * (1 + least_s)) << i;
    decided += most_s > least_s * 1.001;
  }
  EXPECT_GT(decided, 500);
}

// The search as published, for a chain of layers.
std::vector<int> search_as_published(const UnitJob& job) {
  const std::vector<double>& ready_s = job.profile->ready_s;
  const size_t count = ready_s.size();
  const auto order_of = [&](const std::vector<size_t>& p1) {
    std::vector<int> order(count);
    for (size_t l = 0; l < count; ++l) order[p1[l]] = static_cast<int>(l);
    return order;
  };
  std::vector<size_t> p1(count);
  std::iota(p1.begin(), p1.end(), size_t{0});
  double delay_s = both_phases(job, order_of(p1)).delay_s;
  for (size_t l = count - 1; l >= 1; --l) {
    double first_s = -1;
    for (const Send& s : us_byte_phase1(job, order_of(p1)).sends) {
      if (first_s < 0 && s.slice.tensor == static_cast<int>(l)) first_s = s.start_s;
    }
    if (first_s < 0) continue;
    const double tau = first_s + job.cost.time_s(job.bytes[l]);
    size_t k = l;
    while (k > 0 && tau > ready_s[k - 1]) --k;
    std::vector<size_t> candidate = p1;
    candidate[l] = p1[k];
    for (size_t j = k; j < l; ++j) ++candidate[j];
    const double candidate_s = both_phases(job, order_of(candidate)).delay_s;
    if (candidate_s < delay_s) {
      delay_s = candidate_s;
      p1 = candidate;
      l = k;
      if (l == 0) break;
    }
  }
  return order_of(p1);
}

TEST(UsByte, SearchIsAsPublishedAndHelps) {
  std::mt19937 rng(44);
  int better = 0;
  for (int i = 0; i < 2000; ++i) {
    const Profile p = random_chain(rng, uniform(rng, 1, 20), 1e6);
    const UnitJob job(p, {4, {random_cost(rng)}}, units(1 << 14));
    const std::vector<int> order = us_byte_priorities(job);
    EXPECT_EQ(order, search_as_published(job)) << i;
    const double forward_s = both_phases(job, job.forward).delay_s;
    const double found_s = both_phases(job, order).delay_s;
    EXPECT_LE(found_s, forward_s);
    better += found_s < forward_s * 0.999;
  }
  EXPECT_GT(better, 50);
}

TEST(UsByte, ThePlanTakesAsLongAsTheSearchBelieved) {
  std::mt19937 rng(45);
  for (int i = 0; i < 500; ++i) {
    const Profile p = random_job(rng, uniform(rng, 1, 30), 1e8);
    const NetworkModel network = random_network(rng);
    const PolicyOptions options = units(uniform(rng, 1, 1 << 20));
    const UnitJob job(p, network, options);
    const double step_s = p.iteration_s() + both_phases(job, us_byte_priorities(job)).delay_s;
    const Plan plan = make_plan("us-byte", p, network, options);
    EXPECT_NEAR(Simulator(p, network, options.overlap).step_s(plan), step_s, 1e-9 * step_s) << i;
    for (const Op& op : plan.ops()) {
      EXPECT_TRUE(op.fence);
      EXPECT_EQ(plan.tensors_of(op).size(), 1u);
    }
  }
}

}  // namespace
}  // namespace usbyte
