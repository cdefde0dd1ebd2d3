// SPDX-License-Identifier: Apache-2.0
#include "usbyte/network.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "usbyte/error.h"

namespace usbyte {
namespace {

TEST(FitCost, SmallSizesTellTheStartupAndTheLargestTheByte) {
  // 3 ms up to a point, then 10 ns for a byte; one repeat in three is an outlier.
  std::vector<Sample> samples;
  for (int64_t bytes : {1'000, 10'000, 100'000, 1'000'000, 10'000'000}) {
    const double seconds = std::max(3e-3, 1e-8 * static_cast<double>(bytes));
    samples.insert(samples.end(), {{bytes, seconds}, {bytes, seconds}, {bytes, 5 * seconds}});
  }
  const Fit one = fit_cost(samples);
  EXPECT_NEAR(one.cost.alpha_s, 3e-3, 0.2e-3);
  EXPECT_NEAR(one.cost.beta_s_per_byte, 1e-8, 1e-15);
  EXPECT_NEAR(one.cost.latency_s(), 0, 1e-12);
  EXPECT_LT(one.residual, 0.05);
}

TEST(FitCost, TellsHowMuchOfTheStartupOverlaps) {
  std::mt19937 rng(5);
  for (double alpha_s : {25e-6, 3e-3}) {
    for (double beta : {1e-8, 1e-9, 1e-10}) {
      for (double part : {0.0, 0.3, 1.0}) {
        const AlphaBeta cost{alpha_s, beta, part * alpha_s};
        std::vector<Sample> samples;
        for (int64_t bytes : {4'096, 65'536, 1'048'576, 16'777'216, 33'554'432}) {
          for (int repeat = 0; repeat < 9; ++repeat) {
            const double noise = std::uniform_real_distribution<double>(0.99, 1.01)(rng);
            samples.push_back({bytes, noise * cost.time_s(bytes)});
          }
        }
        const AlphaBeta fitted = fit_cost(samples).cost;
        if (beta * 4096 < alpha_s) {
          EXPECT_NEAR(fitted.alpha_s / alpha_s, 1, 0.2);
        }
        EXPECT_NEAR(fitted.beta_s_per_byte / beta, 1, 0.05);
        for (const Sample& s : samples) {
          EXPECT_NEAR(fitted.time_s(s.bytes) / cost.time_s(s.bytes), 1, 0.06) << s.bytes;
        }
      }
    }
  }
}

TEST(FitCost, OneSizeCountsAsBeta) {
  const Fit fit = fit_cost(std::vector<Sample>{{100, 1}, {100, 3}, {100, 1}});
  EXPECT_EQ(fit.cost, (AlphaBeta{0, 0.01, 0}));
  EXPECT_EQ(fit.residual, 0);
  // Two sizes do not tell how much overlaps: all of it.
  EXPECT_EQ(fit_cost(std::vector<Sample>{{100, 2}, {400, 2}}).cost, (AlphaBeta{2, 0.005, 2}));
  EXPECT_EQ(fit_cost(std::vector<Sample>{{1, 2}, {400, 8}}).cost, (AlphaBeta{2, 0.02, 2}));
  EXPECT_THROW(fit_cost(std::vector<Sample>{}), UsageError);
}

TEST(FitCost, WhatCannotHaveBeenMeasuredIsAnError) {
  const double never = std::numeric_limits<double>::infinity();
  for (Sample bad : {Sample{-5, 1}, {100, -1}, {100, never}, {100, std::nan("")}}) {
    EXPECT_THROW(fit_cost(std::vector<Sample>{{1000, 1}, bad}), UsageError);
  }
  EXPECT_THROW(fit_cost(std::vector<Sample>{{0, 1}, {0, 2}}), UsageError);
}

TEST(NetworkModel, CostsComeFromTheCollectiveAndTheWindow) {
  const NetworkModel model{4, {{1, 10}, {2, 20}}, {{3, 30}}, {}};
  EXPECT_EQ(model.cost(Collective::all_reduce, 1), (AlphaBeta{1, 10}));
  EXPECT_EQ(model.cost(Collective::all_reduce, 9), (AlphaBeta{2, 20}));
  EXPECT_EQ(model.cost(Collective::reduce_scatter, 2), (AlphaBeta{3, 30}));
  EXPECT_EQ(model.cost(Collective::all_gather, 2), (AlphaBeta{1, 10}));  // half of an all_reduce
  EXPECT_EQ(NetworkModel::from_json(model.to_json()), model);
  EXPECT_THROW(NetworkModel::from_json("{"), UsageError);
  EXPECT_THROW((NetworkModel{4, {{-1, 0}}}.validate()), UsageError);
  for (double overlap_s : {-1.0, 1.5, std::nan("")}) {
    EXPECT_THROW((NetworkModel{4, {{1, 0, overlap_s}}}.validate()), UsageError);
  }
  EXPECT_THROW((NetworkModel{4, {{1, 0}}, {}, {}, -1}.validate()), UsageError);
  EXPECT_THROW((NetworkModel{4, {{1, 0}}, {}, {}, 0, -1}.validate()), UsageError);
  EXPECT_THROW((NetworkModel{4, {{1, 0}}, {}, {}, 0, std::nan("")}.validate()), UsageError);
  const NetworkModel busy{4, {{1, 10, 0.25}}, {}, {}, 2, 0.5};
  EXPECT_EQ(NetworkModel::from_json(busy.to_json()), busy);
  EXPECT_EQ((NetworkModel{4, {{1, 1}, {2, 2}, {3, 3}}, {}, {}, 2}).cost(Collective::all_reduce, 3),
            (AlphaBeta{2, 2}));
  const NetworkModel packing{4, {{1, 10}}, {}, {}, 0, 0, 0.125};
  EXPECT_EQ(NetworkModel::from_json(packing.to_json()), packing);
  EXPECT_NE(packing, (NetworkModel{4, {{1, 10}}}));
  for (double s_per_byte : {-1.0, std::nan("")}) {
    EXPECT_THROW((NetworkModel{4, {{1, 0}}, {}, {}, 0, 0, s_per_byte}.validate()), UsageError);
  }
  NetworkModel shots{4, {{1, 10}}};
  shots.one_shot = {1024, 0.5, 0.25, 0.75};
  EXPECT_EQ(NetworkModel::from_json(shots.to_json()), shots);
  EXPECT_NE(shots, (NetworkModel{4, {{1, 10}}}));
  for (const OneShot& wrong :
       {OneShot{-1, 0, 0}, {1, -1, 0}, {1, 0, -1}, {1, 0, 0, -1}, {1, std::nan(""), 0}}) {
    shots.one_shot = wrong;
    EXPECT_THROW(shots.validate(), UsageError);
  }
  const NetworkModel ring = NetworkModel::ring(4, 1e-5, 1e9);
  EXPECT_NEAR(ring.cost(Collective::all_reduce, 1).time_s(1'000'000), 6e-5 + 1.5e-3, 1e-12);
  EXPECT_NEAR(ring.least_beta(), 1.5e-9, 1e-18);
  const NetworkModel serial = NetworkModel::ring(4, 1e-5, 1e9, 1);
  EXPECT_NE(serial, ring);
  EXPECT_EQ(NetworkModel::from_json(serial.to_json()), serial);
  // Networks written before the choice was there.
  const char* old = R"({"format": "usbyte-network-1", "ranks": 2, "reduce_scatter": [],
                        "all_reduce": [{"alpha_s": 1, "beta_s_per_byte": 2}], "all_gather": []})";
  EXPECT_EQ(NetworkModel::from_json(old), (NetworkModel{2, {{1, 2}}}));
}

TEST(NetworkModel, ScalesStartupsAndBytes) {
  const NetworkModel network{4,   {{2, 3, 1}, {4, 3, 2}}, {{2, 1, 0}}, {{4, 1, 1}}, 2, 6,
                             0.5, {100, 8, 10, 12}};
  const NetworkModel scaled{
      4, {{1, 9, 0.5}, {2, 9, 1}}, {{1, 3, 0}}, {{2, 3, 0.5}}, 2, 3, 0.5, {100, 4, 5, 6}};
  EXPECT_EQ(network.scaled(0.5, 3), scaled);
  EXPECT_EQ(network.scaled(1, 1), network);
  EXPECT_THROW(network.scaled(-1, 1), UsageError);
}

}  // namespace
}  // namespace usbyte
