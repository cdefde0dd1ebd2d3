// SPDX-License-Identifier: Apache-2.0
// PowerSGD: sums of factors instead of sums of matrices.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec_rig.h"
#include "usbyte/codec.h"

namespace usbyte {
namespace {

using test::kNan;
using test::norm;
using test::Random;

std::vector<float> normal(Random& random, int64_t count) {
  std::normal_distribution<float> drawn(0, 1);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = drawn(random.engine());
  return out;
}

// Ranks that all send a matrix.
class Senders {
 public:
  Senders(int rank, int64_t rows, int64_t cols, int ranks)
      : codec_(make_codec("powersgd:" + std::to_string(rank))), rows_(rows), cols_(cols) {
    const auto count = static_cast<size_t>(rows * cols);
    for (int r = 0; r < ranks; ++r) {
      unsent.emplace_back(count);
      starts_.emplace_back(count);
    }
  }

  // What every rank has then; the ranks' own answers are equal to the bit.
  std::vector<float> send(const std::vector<std::vector<float>>& gradients) {
    const Matrices& m = *codec_->matrices();
    const RngKey rng = RngKey::of(1, ++step_, 0, 0);
    std::vector<float> p(static_cast<size_t>(m.rank() * rows_)),
        q(static_cast<size_t>(m.rank() * cols_));
    std::vector<CodecState> memories;
    const auto add_up = [&](std::vector<float>& sum, auto part_of) {
      std::vector<float> total(sum.size());
      for (size_t r = 0; r < gradients.size(); ++r) {
        std::vector<float> part(sum.size(), 7.0F);
        part_of(r, part);
        for (size_t i = 0; i < sum.size(); ++i) total[i] += part[i];
      }
      sum = total;
    };
    for (size_t r = 0; r < gradients.size(); ++r) {
      memories.push_back({{unsent[r].data(), starts_[r].data()}});
    }
    add_up(p, [&](size_t r, std::vector<float>& part) {
      m.first(gradients[r], rows_, memories[r], rng, part);
    });
    std::vector<std::vector<float>> firsts(gradients.size(), p);
    add_up(q, [&](size_t r, std::vector<float>& part) {
      m.second(rows_, cols_, memories[r], firsts[r], part);
    });
    std::vector<std::vector<float>> values(gradients.size(),
                                           std::vector<float>(unsent[0].size(), 5));
    for (size_t r = 0; r < gradients.size(); ++r) {
      m.finish(rows_, firsts[r], q, memories[r], values[r]);
      for (size_t i = 0; i < values[r].size(); ++i) {
        EXPECT_EQ(std::isnan(values[r][i]), std::isnan(values[0][i]));
        if (!std::isnan(values[0][i])) {
          EXPECT_EQ(values[r][i], values[0][i]);
        }
      }
      EXPECT_EQ(starts_[r], starts_[0]);
    }
    return values[0];
  }

  std::vector<std::vector<float>> unsent;  // by rank

 private:
  const std::shared_ptr<const Codec> codec_;
  const int64_t rows_, cols_;
  std::vector<std::vector<float>> starts_;
  int64_t step_ = 0;
};

// Sum of `values.size()` products of orthonormal columns, times those.
std::vector<float> with_singular_values(Random& random, int64_t rows, int64_t cols,
                                        const std::vector<double>& values) {
  const auto orthonormal = [&](int64_t length) {
    std::vector<std::vector<double>> out;
    for (size_t k = 0; k < values.size(); ++k) {
      const std::vector<float> drawn = normal(random, length);
      std::vector<double> column(drawn.begin(), drawn.end());
      for (int pass = 0; pass < 2; ++pass) {
        for (const auto& o : out) {
          double along = 0;
          for (size_t i = 0; i < column.size(); ++i) along += o[i] * column[i];
          for (size_t i = 0; i < column.size(); ++i) column[i] -= along * o[i];
        }
      }
      double squares = 0;
      for (double x : column) squares += x * x;
      for (double& x : column) x /= std::sqrt(squares);
      out.push_back(column);
    }
    return out;
  };
  const auto u = orthonormal(rows), v = orthonormal(cols);
  std::vector<float> out;
  for (size_t i = 0; i < static_cast<size_t>(rows); ++i) {
    for (size_t j = 0; j < static_cast<size_t>(cols); ++j) {
      double sum = 0;
      for (size_t k = 0; k < values.size(); ++k) sum += values[k] * u[k][i] * v[k][j];
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> difference;
  for (size_t i = 0; i < a.size(); ++i) difference.push_back(a[i] - b[i]);
  return norm(difference);
}

TEST(PowerSgd, MatricesOfItsRankArriveWhole) {
  Random random(1);
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{20, 30}, {50, 7}, {6, 200}}) {
    for (int rank : {1, 2, 3}) {
      const std::vector<float> matrix = with_singular_values(
          random, rows, cols, std::vector<double>(static_cast<size_t>(rank), 2.0));
      Senders senders(rank, rows, cols, 1);
      EXPECT_LT(distance(senders.send({matrix}), matrix), 1e-5 * norm(matrix)) << rows << rank;
      EXPECT_LT(norm(senders.unsent[0]), 1e-5 * norm(matrix));
    }
  }
}

TEST(PowerSgd, WhatIsSentAndWhatIsRememberedAreAllThereWas) {
  Random random(2);
  constexpr int64_t kRows = 24, kCols = 40;
  for (int rank : {1, 4}) {
    Senders senders(rank, kRows, kCols, 3);
    std::vector<double> produced(kRows * kCols), sent(kRows * kCols);
    for (int step = 0; step < 60; ++step) {
      std::vector<std::vector<float>> gradients;
      for (int r = 0; r < 3; ++r) {
        gradients.push_back(normal(random, kRows * kCols));
        for (size_t i = 0; i < produced.size(); ++i) produced[i] += gradients.back()[i];
      }
      const std::vector<float> got = senders.send(gradients);
      for (size_t i = 0; i < sent.size(); ++i) sent[i] += got[i];
    }
    for (size_t i = 0; i < sent.size(); ++i) {
      double left = 0;
      for (const auto& m : senders.unsent) left += m[i];
      ASSERT_NEAR(sent[i] + left, produced[i], 2e-3);
    }
  }
}

// Starting from the step before, it comes to the best there is of that rank.
TEST(PowerSgd, StepsOfSubspaceIterationAddUp) {
  Random random(3);
  const std::vector<double> values = {8, 6, 3, 2, 1, 1, 1};
  const std::vector<float> matrix = with_singular_values(random, 30, 50, values);
  const double best = std::sqrt(9.0 + 4 + 1 + 1 + 1);
  Senders senders(2, 30, 50, 1);
  double first = 0, last = 0;
  for (int step = 0; step < 12; ++step) {
    std::fill(senders.unsent[0].begin(), senders.unsent[0].end(), 0.0F);
    last = distance(senders.send({matrix}), matrix);
    if (step == 0) first = last;
    EXPECT_GT(last, best * (1 - 1e-5));
  }
  EXPECT_GT(first, 1.02 * best);
  EXPECT_LT(last, 1.001 * best);
}

TEST(PowerSgd, WhatIsNotFiniteIsSeenOnceByAll) {
  Random random(4);
  Senders senders(2, 10, 12, 2);
  for (int step = 0; step < 6; ++step) {
    std::vector<std::vector<float>> gradients = {normal(random, 120), normal(random, 120)};
    if (step == 2) gradients[1][30] = kNan;
    const std::vector<float> got = senders.send(gradients);
    for (float x : got) ASSERT_EQ(std::isfinite(x), step != 2) << step;
    EXPECT_TRUE(std::isfinite(norm(senders.unsent[0]) + norm(senders.unsent[1])));
  }
}

TEST(PowerSgd, ZerosAndThinMatricesAreNoTrouble) {
  Senders senders(3, 8, 9, 2);
  const std::vector<float> zeros(72), ones(72, 1.0F);
  EXPECT_EQ(senders.send({zeros, zeros}), zeros);
  EXPECT_LT(distance(senders.send({ones, zeros}), ones), 1e-4);  // of rank 1
  EXPECT_LT(distance(senders.send({ones, ones}), std::vector<float>(72, 2.0F)), 1e-4);
}

TEST(PowerSgd, KnowsWhereItPays) {
  const Matrices& m = *make_codec("powersgd:4")->matrices();
  EXPECT_TRUE(m.pays(9, 9));
  EXPECT_FALSE(m.pays(8, 8));
  EXPECT_FALSE(m.pays(1, 1000));
}

}  // namespace
}  // namespace usbyte
