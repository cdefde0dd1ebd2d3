// SPDX-License-Identifier: Apache-2.0
#include "simulator/channel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "usbyte/error.h"

namespace usbyte {
namespace {

using Done = std::vector<std::pair<int, double>>;  // ops and when they completed, in that order

struct Launch {
  double at_s;
  int64_t bytes;
  Collective kind = Collective::all_reduce;
};

Done run(const NetworkModel& network, const std::vector<Launch>& launches) {
  Channel channel(network);
  Done done;
  size_t next = 0;
  while (done.size() < launches.size()) {
    if (next < launches.size() && launches[next].at_s <= channel.next_s()) {
      const Launch& l = launches[next];
      channel.launch(static_cast<int>(next++), l.kind, l.bytes, l.at_s);
    } else if (const int op = channel.advance(); op >= 0) {
      done.emplace_back(op, channel.now_s());
    }
  }
  EXPECT_TRUE(std::isinf(channel.next_s()));
  return done;
}

TEST(Channel, OneOpTakesStartupAndBytes) {
  EXPECT_EQ(run({2, {{1, 0.5}}}, {{3, 8}}), (Done{{0, 8}}));
  EXPECT_EQ(run({2, {{1, 0.5}}}, {{3, 8, Collective::all_gather}}), (Done{{0, 5.5}}));
}

TEST(Channel, BytesTravelDuringTheEndOfTheStartup) {
  const NetworkModel network{2, {{4, 1, 3}}};  // from 1 s on
  EXPECT_EQ(run(network, {{0, 2}, {10, 3}, {20, 8}}), (Done{{0, 4}, {1, 14}, {2, 29}}));
  // Both flow from 1: the first has its bytes at 3, the other at 4 + 2.
  EXPECT_EQ(run(network, {{0, 1}, {0, 4}}), (Done{{0, 4}, {1, 6}}));
  // No more than one byte in a second, however many start up.
  EXPECT_EQ(run(network, {{0, 2}, {0, 2}, {0, 2}, {0, 2}}), (Done{{0, 9}, {1, 9}, {2, 9}, {3, 9}}));
  NetworkModel one = network;
  one.concurrent = 1;
  EXPECT_EQ(run(one, {{0, 1}, {0, 1}}), (Done{{0, 4}, {1, 8}}));
}

TEST(Channel, RoundsOfAStartupThatOverlapsGoOnBesideOthers) {
  NetworkModel network{2, {{4, 1, 4}}};
  network.busy_alpha_s = 8;
  // Its byte is through at 1; at 2, when the other joins, half of its rounds are left.
  EXPECT_EQ(run(network, {{0, 1}, {2, 20}}), (Done{{0, 6}, {1, 22}}));
  // The gather's byte has flown at 6, its rounds wait for the other's bytes, which end at 7.
  network = {2, {{10, 1, 10}}, {}, {{1, 1}}};
  network.busy_alpha_s = 8;
  EXPECT_EQ(run(network, {{0, 6}, {3, 1, Collective::all_gather}}), (Done{{1, 7}, {0, 10}}));
}

TEST(Channel, BytesInFlightShareEqually) {
  // Both flow from 1; the small one is through at 5 and the other has got as much.
  EXPECT_EQ(run({2, {{1, 1}}}, {{0, 6}, {0, 2}}), (Done{{1, 5}, {0, 9}}));
  // A startup in the shade of the bytes before costs nothing.
  EXPECT_EQ(run({2, {{1, 1}}}, {{0, 4}, {4, 4}}), (Done{{0, 5}, {1, 9}}));
  // One that begins halfway halves the rate of the rest.
  EXPECT_EQ(run({2, {{0, 1}}}, {{0, 4}, {2, 8}}), (Done{{0, 6}, {1, 12}}));
}

TEST(Channel, CostsDependOnHowManyAreInFlight) {
  EXPECT_EQ(run({2, {{1, 1}, {2, 2}}}, {{0, 1}, {0, 1}}), (Done{{0, 2}, {1, 4}}));
}

TEST(Channel, NoMoreRunThanTheNetworkAllows) {
  NetworkModel network{2, {{1, 1}}};
  network.concurrent = 1;
  EXPECT_EQ(run(network, {{0, 6}, {0, 2}, {20, 1}}), (Done{{0, 7}, {1, 10}, {2, 22}}));
  network.concurrent = 2;
  EXPECT_EQ(run(network, {{0, 4}, {0, 2}, {0, 1}}), (Done{{1, 5}, {0, 8}, {2, 8}}));
}

TEST(Channel, SmallOpsQueueBehindOthersBytes) {
  NetworkModel network{2, {{1, 1}}};
  network.busy_alpha_s = 5;
  // The bytes of the second have flown at 2 + 1 + 2 * 1, but its rounds take until 7.
  EXPECT_EQ(run(network, {{0, 20}, {2, 1}}), (Done{{1, 7}, {0, 22}}));
  // Beside an op of 4 s they take no more than that.
  EXPECT_EQ(run(network, {{0, 4}, {2, 1}}), (Done{{1, 6}, {0, 6}}));
  // Alone, with more bytes, or beside as small ones, it makes no difference.
  EXPECT_EQ(run(network, {{0, 1}, {2, 1}}), (Done{{0, 2}, {1, 4}}));
  EXPECT_EQ(run(network, {{0, 20}, {2, 9}}), (Done{{1, 21}, {0, 30}}));
  EXPECT_EQ(run(network, {{0, 1}, {0, 1}}), (Done{{0, 3}, {1, 3}}));
}

TEST(Channel, RoundsGoOnAtTheirPaceWhenOthersComeAndGo) {
  NetworkModel network{2, {{4, 1}}};
  network.busy_alpha_s = 8;
  EXPECT_EQ(run(network, {{0, 1}, {0, 20}}), (Done{{0, 8}, {1, 25}}));
  // Half of the startup is left when the other joins, and then none of it.
  EXPECT_EQ(run(network, {{0, 1}, {2, 20}}), (Done{{0, 6}, {1, 26}}));
  EXPECT_EQ(run(network, {{0, 1}, {4, 20}}), (Done{{0, 5}, {1, 28}}));
  // From 13 to 19 beside the first, 6 / 8 of them; the rest, alone, takes no time.
  EXPECT_EQ(run(network, {{0, 14}, {13, 1}}), (Done{{0, 19}, {1, 19}}));
  // A third joins at 18, and the rest takes 8 * 2 / 8 of a second more than until 19.
  EXPECT_EQ(run(network, {{0, 14}, {13, 1}, {18, 20}}), (Done{{0, 19}, {1, 21}, {2, 42}}));
}

TEST(Channel, GathersDoNotWaitForTheStartupOfAnAllReduce) {
  NetworkModel network{2, {{8, 1}}, {{1, 1}}, {{1, 1}}};
  network.busy_alpha_s = 1;
  Channel channel(network);
  for (int op : {0, 1}) channel.launch(op, Collective::all_gather, 1, 0);
  Done done;
  while (done.size() < 2) {
    if (const int op = channel.advance(); op >= 0) done.emplace_back(op, channel.now_s());
  }
  EXPECT_EQ(done, (Done{{0, 3}, {1, 3}}));
}

TEST(Channel, PackingLengthensTheStartupOfAnAllReduceOnly) {
  NetworkModel network{2, {{1, 1}}, {{1, 1}}};
  network.pack_s_per_byte = 0.5;
  for (const auto& [kind, end] :
       {std::pair(Collective::all_reduce, 7.0), std::pair(Collective::reduce_scatter, 5.0)}) {
    Channel channel(network);
    channel.launch(0, kind, 4, 0, true);
    while (channel.advance() < 0) {
    }
    EXPECT_EQ(channel.now_s(), end);
  }
}

TEST(Channel, OneShotPassesByWhatIsInFlight) {
  NetworkModel network{2, {{1, 1}}};
  network.concurrent = 1;
  network.busy_alpha_s = 50;
  network.one_shot = {2, 3, 2};
  // At once, however many run; its bytes keep the others from the channel.
  EXPECT_EQ(run(network, {{0, 6}, {0, 4}, {2, 1}, {20, 2}}),
            (Done{{2, 5}, {0, 8}, {1, 13}, {3, 23}}));
  // One after the other, and only all_reduces.
  EXPECT_EQ(run(network, {{0, 1}, {0, 1}, {0, 1}}), (Done{{0, 3}, {1, 5}, {2, 7}}));
  // What comes behind them is launched behind them, even if it waits for another one.
  EXPECT_EQ(run(network, {{0, 1}, {0, 1}, {1, 6}}), (Done{{0, 3}, {1, 5}, {2, 11}}));
  EXPECT_EQ(run(network, {{0, 6}, {0, 1}, {0, 4}}), (Done{{1, 3}, {0, 7}, {2, 12}}));
  EXPECT_EQ(run(network, {{0, 3}, {3, 1}, {3, 1}, {3, 1}, {3, 1}, {3, 6}}),
            (Done{{1, 6}, {2, 8}, {0, 8}, {3, 10}, {4, 12}, {5, 18}}));
  // Slower beside others than beside their like, begun or not.
  network.one_shot.busy_latency_s = 4;
  EXPECT_EQ(run(network, {{0, 6}, {2, 1}, {20, 1}, {21, 1}}),
            (Done{{1, 6}, {0, 8}, {2, 23}, {3, 25}}));
  EXPECT_EQ(run(network, {{0, 2, Collective::all_gather}}), (Done{{0, 1.5}}));
  // Bytes that begin to flow wait for those of a shot; in 6 ranks these take three times as long.
  EXPECT_EQ(run({6, {{1, 1}}, {}, {}, 0, 0, 0, {2, 3, 2}}, {{0, 4}, {0, 1}, {0, 2}}),
            (Done{{1, 3}, {2, 9}, {0, 13}}));
}

TEST(Channel, WhatIsLaunchedBehindShotsHasNotBegun) {
  NetworkModel network{2, {{1, 1}}};
  network.concurrent = 2;
  network.one_shot = {2, 3, 4};
  // One does not overtake another.
  EXPECT_EQ(run(network, {{0, 3}, {0, 1}, {0, 1}, {0, 1}, {0, 1}, {0, 6}, {0, 6}}),
            (Done{{1, 3}, {2, 7}, {0, 7}, {3, 11}, {4, 15}, {5, 29}, {6, 29}}));
  // Shots behind it are beside it.
  network = {2, {{1, 1}}};
  network.one_shot = {2, 3, 2, 10};
  EXPECT_EQ(run(network, {{0, 1}, {0, 6}, {0, 1}}), (Done{{0, 3}, {1, 9}, {2, 10}}));
  // None of its rounds are through when it begins.
  network = {2, {{4, 1, 4}}};
  network.busy_alpha_s = 8;
  network.one_shot = {2, 1, 4};
  EXPECT_EQ(run(network, {{0, 1}, {0, 3}, {4, 20}}), (Done{{0, 1}, {1, 12}, {2, 27}}));
  EXPECT_EQ(run(network, {{0, 20}, {0, 1}, {0, 3}}), (Done{{1, 1}, {2, 12}, {0, 24}}));
}

TEST(Channel, BytesOfOneShotAreThereOnceOnly) {
  NetworkModel network{2, {{0, 1}}};
  network.one_shot = {10, 0, 0};
  // Both large ones wait for the 20 s of the shots, and then share.
  EXPECT_EQ(run(network, {{0, 1000}, {0, 10}, {0, 10}, {0, 11}}),
            (Done{{1, 10}, {2, 20}, {3, 42}, {0, 1031}}));
}

TEST(Channel, RefusesWhatNeverEnds) {
  const NetworkModel network{2, {{0, 1e305}}};
  Channel channel(network);
  EXPECT_THROW(channel.launch(0, Collective::all_reduce, 1 << 20, 0), UsageError);
}

// Whoever flows gets a tick of its own in turn, of all the ticks there are.
Done by_small_steps(const AlphaBeta& cost, const std::vector<Launch>& launches, double tick_s) {
  std::vector<double> rest;
  for (const Launch& l : launches) {
    rest.push_back(cost.beta_s_per_byte * static_cast<double>(l.bytes));
  }
  Done done;
  for (double now = 0; done.size() < launches.size(); now += tick_s) {
    std::vector<size_t> flowing;
    for (size_t i = 0; i < launches.size(); ++i) {
      if (rest[i] > 0 && launches[i].at_s + cost.latency_s() <= now) flowing.push_back(i);
    }
    for (size_t i : flowing) {
      rest[i] -= tick_s / static_cast<double>(flowing.size());
      if (rest[i] > 0) continue;
      done.emplace_back(static_cast<int>(i),
                        std::max(now + tick_s, launches[i].at_s + cost.alpha_s));
    }
  }
  return done;
}

TEST(Channel, EqualsSmallSteps) {
  std::mt19937 rng(3);
  const double tick = 1.0 / 512;
  for (int round = 0; round < 200; ++round) {
    std::vector<Launch> launches;
    double at = 0;
    for (unsigned i = 0; i < 1 + rng() % 6; ++i) {
      launches.push_back({at, 1 + static_cast<int64_t>(rng() % 20)});
      at += static_cast<double>(rng() % 8) / 4;
    }
    const AlphaBeta cost{0.75, 0.25, 0.25 * static_cast<double>(rng() % 4)};
    Done exact = run({2, {cost}}, launches);
    Done expected = by_small_steps(cost, launches, tick);
    std::sort(exact.begin(), exact.end());
    std::sort(expected.begin(), expected.end());
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_EQ(exact[i].first, expected[i].first);
      EXPECT_NEAR(exact[i].second, expected[i].second, 8 * tick);
    }
  }
}

}  // namespace
}  // namespace usbyte
