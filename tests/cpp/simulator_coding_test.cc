// SPDX-License-Identifier: Apache-2.0
// Coded ops as predicted: one thread that encodes and decodes, beside compute and channel.
#include <gtest/gtest.h>

#include <set>

#include "random_plan.h"
#include "random_profile.h"
#include "usbyte/error.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

constexpr int64_t kUnlimited = 1 << 30;

// Backward 3-9 s; tensor i of 10 elements is ready at 9, 7 and 5.
Profile three_layers() {
  Profile p;
  for (int64_t i = 0; i < 3; ++i) {
    p.tensors.push_back({std::string(1, static_cast<char>('a' + i)), 10, DType::float32, 10 * i});
  }
  p.need_s = {0, 1, 2};
  p.ready_s = {9, 7, 5};
  p.step_s = 9;
  return p;
}

Plan one_each(const Profile& p, const std::vector<std::string>& codecs, bool fence = true) {
  std::vector<Op> ops;
  for (int64_t t : {2, 1, 0}) {
    ops.push_back({Collective::all_reduce,
                   {{10 * t, 10 * t + 10}},
                   kUnlimited,
                   fence,
                   codecs[static_cast<size_t>(t)]});
  }
  return Plan("test", p.tensors, ops);
}

AlphaBeta constant(double s) { return {s, 0, s}; }

Prediction predict(const Profile& p, const Plan& plan, const CodecCosts& costs, double alpha_s) {
  return Simulator(p, {2, {{alpha_s, 0}}}, Overlap::forward, false, costs).predict(plan);
}

TEST(SimulatorCoding, EncodingAndDecodingTakeTime) {
  const Profile p = three_layers();
  const Plan plan = one_each(p, {"fp16", "fp16", "fp16"});
  const CodecCosts costs{{{"fp16", {constant(0.25), constant(0.5)}}}};
  const Prediction predicted = predict(p, plan, costs, 1);
  EXPECT_EQ(predicted.record.queued_s, (std::vector<double>{5, 7, 9}));
  EXPECT_EQ(predicted.record.launched_s, (std::vector<double>{5.25, 7.25, 9.25}));
  EXPECT_EQ(predicted.record.done_s, (std::vector<double>{6.75, 8.75, 10.75}));
  EXPECT_EQ(predicted.arrived_s, (std::vector<double>{10.75, 8.75, 6.75}));
  EXPECT_EQ(predicted.step_s, 10.75);
  // By bytes of float32, beyond the constant.
  const CodecCosts dear{{{"fp16", {{0.25, 0.0125, 0.25}, constant(0.5)}}}};
  EXPECT_EQ(predict(p, plan, dear, 1).record.launched_s, (std::vector<double>{5.5, 7.5, 9.5}));
  EXPECT_EQ(predict(p, plan, {}, 1).arrived_s, (std::vector<double>{10, 8, 6}));
}

TEST(SimulatorCoding, TheWindowIsFreeBeforeDecodingEnds) {
  Profile p = three_layers();
  p.ready_s = {5, 5, 5};
  // Encoded at 6, 7 and 8. The first message is there at 7, when the thread takes its decoding
  // rather than the third encoding; the second op is launched all the same.
  const CodecCosts costs{{{"fp16", {constant(1), constant(4)}}}};
  const Prediction predicted = predict(p, one_each(p, {"fp16", "fp16", "fp16"}), costs, 1);
  EXPECT_EQ(predicted.record.launched_s, (std::vector<double>{6, 7, 16}));
  EXPECT_EQ(predicted.record.done_s, (std::vector<double>{11, 15, 21}));
}

TEST(SimulatorCoding, GatheredMessagesAreDecodedOneByOne) {
  const Profile p = three_layers();
  const CodecCosts costs{{{"int8", {constant(0.25), constant(0.5)}}}};
  const Prediction predicted = predict(p, one_each(p, {"none", "none", "int8"}), costs, 1);
  EXPECT_EQ(predicted.record.done_s, (std::vector<double>{0.25 + 5 + 0.5 + 2 * 0.5, 8, 10}));
}

// A tensor of 8 x 8 that is ready at 5, on two ranks; an all_reduce takes 1, other ops half of it.
std::vector<double> done_in_two_ops(const std::string& codec, bool at_once = false) {
  Profile p;
  p.tensors = {{"a", 64, DType::float32, 0, 8}};
  p.need_s = {0};
  p.ready_s = {5};
  const Plan plan("test", p.tensors,
                  {{Collective::reduce_scatter, {{0, 64}}, kUnlimited, false, codec},
                   {Collective::all_gather, {{0, 64}}, kUnlimited, false, codec}});
  return predict(p, plan, {{{codec, {constant(0.25), constant(0.5), at_once}}}}, 1).record.done_s;
}

TEST(SimulatorCoding, ShardsAreMessagesOfTheirOwn) {
  // Both shards are encoded, the own one's two messages decoded; then it is encoded again, and the
  // messages of both are decoded.
  const double scattered = 5 + 2 * 0.25 + 0.5 + 2 * 0.5;
  EXPECT_EQ(done_in_two_ops("int8"),
            (std::vector<double>{scattered, scattered + 0.25 + 0.5 + 2 * 0.5}));
}

TEST(SimulatorCoding, RoundsShareWhatAMatrixTakes) {
  const double first = 5 + 0.25 / 2 + 1;  // its sums need no decoding
  EXPECT_EQ(done_in_two_ops("powersgd:1"),
            (std::vector<double>{first, first + 0.25 / 2 + 1 + 0.5}));
}

TEST(SimulatorCoding, BlocksAreMessagesOfTheirOwn) {
  const Profile p = three_layers();
  const Plan plan("test", p.tensors,
                  {{Collective::all_reduce, {{0, 10}, {20, 30}}, kUnlimited, false, "int8"},
                   {Collective::all_reduce, {{10, 20}}, kUnlimited, false, "none"}});
  const CodecCosts costs{{{"int8", {constant(0.25), constant(0.5)}}}};
  EXPECT_EQ(predict(p, plan, costs, 1).record.done_s[0], 9 + 2 * 0.25 + 0.5 + 2 * 2 * 0.5);
}

TEST(SimulatorCoding, MessagesThatAreCodedAtOnceShareTheLeastTime) {
  const double scattered = 5 + 0.25 + 0.5 + 0.5;
  EXPECT_EQ(done_in_two_ops("int8", true),
            (std::vector<double>{scattered, scattered + 0.25 + 0.5 + 0.5}));
  EXPECT_EQ(done_in_two_ops("powersgd:1", true), done_in_two_ops("powersgd:1"));
  // Two blocks of 40 bytes, of each of which two ranks send a message.
  const Profile p = three_layers();
  const Plan plan("test", p.tensors,
                  {{Collective::all_reduce, {{0, 10}, {20, 30}}, kUnlimited, false, "int8"},
                   {Collective::all_reduce, {{10, 20}}, kUnlimited, false, "none"}});
  const auto done_s = [&](const AlphaBeta& encode, const AlphaBeta& decode, double further) {
    return predict(p, plan, {{{"int8", {encode, decode, true, further}}}}, 1).record.done_s[0];
  };
  EXPECT_EQ(done_s(constant(0.25), constant(0.5), 0), 9 + 0.25 + 0.5 + 0.5);
  EXPECT_EQ(done_s({0.25, 0.0125, 0.25}, {0.5, 0.0125, 0.5}, 0.025), 9 + 1 + 0.5 + 1 + 2);
}

TEST(SimulatorCoding, AJobIsNotInterruptedAndTheFirstOpGoesFirst) {
  Profile p = three_layers();
  p.ready_s = {5, 7, 6};  // op 2 of tensor 0 is encoded first, 5-8; then op 0, then op 1
  const CodecCosts costs{{{"fp16", {constant(3), constant(1)}}}};
  const Prediction predicted = predict(p, one_each(p, {"fp16", "fp16", "fp16"}), costs, 10);
  EXPECT_EQ(predicted.record.launched_s, (std::vector<double>{11, 21, 31}));
  EXPECT_EQ(predicted.record.done_s, (std::vector<double>{22, 32, 42}));
  // At one moment, both wait before the thread takes one.
  p.ready_s = {5, 5, 5};
  const Prediction together = predict(p, one_each(p, {"fp16", "fp16", "fp16"}), costs, 10);
  EXPECT_EQ(together.record.launched_s, (std::vector<double>{8, 18, 28}));
}

TEST(SimulatorCoding, UnknownCostsAreAnErrorAndPlansWithoutCodecsNeedNone) {
  const Profile p = three_layers();
  const CodecCosts costs{{{"fp16", {constant(1), constant(1)}}}};
  try {
    predict(p, one_each(p, {"none", "fp16", "int8"}), costs, 1);
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("usbyte probe --codecs int8"), std::string::npos);
  }
  const Plan plain = one_each(p, {"none", "none", "none"});
  EXPECT_EQ(predict(p, plain, costs, 1).arrived_s, predict(p, plain, {}, 1).arrived_s);
}

// Second by second: what has ended, what is ready, what may be launched, what the thread takes.
std::vector<double> by_the_second(const Profile& p, const Plan& plan, const CodecCosts& costs,
                                  const NetworkModel& network) {
  const size_t count = plan.ops().size();
  std::vector<int64_t> launched(count, -1), received(count, -1), encoded(count, -1);
  std::vector<double> done(count, -1);
  std::set<std::pair<size_t, bool>> waiting;
  std::pair<size_t, bool> job{count, false};
  int64_t job_ends = -1;
  size_t next = 0;
  const auto codes = [&](size_t i) { return plan.ops()[i].codec != "none"; };
  const auto seconds = [&](size_t i, bool decodes) {
    const CodecCost cost = costs.of(plan.ops()[i].codec);
    const bool gathered =
        plan.traffic(plan.ops()[i], network.ranks).first != Collective::all_reduce;
    double one = 0;
    for (Block b : plan.ops()[i].blocks) {
      one += (decodes ? cost.decode : cost.encode).time_s(4 * b.numel());
    }
    return static_cast<int64_t>(decodes && gathered ? one * network.ranks : one);
  };
  const auto queued_s = [&](size_t i) {
    double at = 0;
    for (int t : plan.tensors_of(plan.ops()[i]))
      at = std::max(at, p.ready_s[static_cast<size_t>(t)]);
    return at;
  };
  for (int64_t now = 0; std::count(done.begin(), done.end(), -1) > 0; ++now) {
    for (size_t i = 0; i < count; ++i) {
      if (received[i] == now) {
        if (codes(i)) {
          waiting.insert({i, true});
        } else {
          done[i] = static_cast<double>(now);
        }
      }
      if (codes(i) && queued_s(i) == static_cast<double>(now)) waiting.insert({i, false});
    }
    if (job_ends == now) {
      if (job.second) {
        done[job.first] = static_cast<double>(now);
      } else {
        encoded[job.first] = now;
      }
      job_ends = -1;
    }
    for (; next < count; ++next) {
      const Op& op = plan.ops()[next];
      if (codes(next) ? encoded[next] < 0 : queued_s(next) > static_cast<double>(now)) break;
      int64_t bytes = 0, in_flight = 0;
      for (size_t i = 0; i < next; ++i) {
        if (received[i] <= now) continue;
        bytes += plan.message_bytes(plan.ops()[i]);
        ++in_flight;
      }
      if (in_flight && (op.fence || bytes + plan.message_bytes(op) > op.window_bytes)) break;
      const auto [kind, payload] = plan.traffic(op, network.ranks);
      launched[next] = now;
      received[next] = now + static_cast<int64_t>(network.cost(kind, 1).time_s(payload));
    }
    if (job_ends < 0 && !waiting.empty()) {
      job = *waiting.begin();
      waiting.erase(waiting.begin());
      job_ends = now + seconds(job.first, job.second);
    }
  }
  return done;
}

TEST(SimulatorCoding, EqualsASimulationSecondBySecond) {
  constexpr const char* kSpecs[] = {"none", "fp16", "int8", "topk:0.2", "none"};
  std::mt19937 rng(8);
  const auto cost = [&] {
    AlphaBeta c = constant(static_cast<double>(uniform(rng, 1, 6)));
    c.beta_s_per_byte = static_cast<double>(uniform(rng, 0, 1)) / 4;
    return c;
  };
  int waited = 0;
  for (int i = 0; i < cases(800); ++i) {
    Profile p = random_profile(rng);
    for (TensorSpec& t : p.tensors) t.dtype = DType::float32;
    std::vector<Op> ops;
    const Plan any = random_plan(rng, p.tensors);
    for (const Op& op : any.ops()) {
      if (op.kind == Collective::all_gather) continue;
      ops.push_back({Collective::all_reduce, op.blocks, op.window_bytes, op.fence});
    }
    std::vector<std::string> codecs;
    for (size_t t = 0; t < p.tensors.size(); ++t) codecs.emplace_back(kSpecs[uniform(rng, 0, 4)]);
    // Startups do not share the channel, bytes do. Gathers cost half.
    const bool one_at_a_time = uniform(rng, 0, 1) == 0;
    if (one_at_a_time) {
      for (Op& op : ops) op.fence = true;
    }
    const NetworkModel network{
        3, {{2 * static_cast<double>(uniform(rng, 1, 10)), one_at_a_time ? 2.0 : 0.0}}};
    Plan plan = with_codecs(Plan("test", p.tensors, ops), codecs);
    if (one_at_a_time) {
      ops = plan.ops();
      for (Op& op : ops) op.fence = true;
      plan = plan.with_ops("test", ops);
    }
    const CodecCosts costs{
        {{"fp16", {cost(), cost()}}, {"int8", {cost(), cost()}}, {"topk:0.2", {cost(), cost()}}}};
    Simulator simulator(p, network, Overlap::forward, false, costs);
    const std::vector<double> done = simulator.predict(plan).record.done_s;
    ASSERT_EQ(done, by_the_second(p, plan, costs, network)) << i;
    EXPECT_EQ(simulator.end_s(), *std::max_element(done.begin(), done.end()));
    Simulator free(p, network, Overlap::forward);
    waited += free.predict(plan).record.done_s != done;
  }
  EXPECT_GT(waited, cases(800) / 2);
}

}  // namespace
}  // namespace usbyte
