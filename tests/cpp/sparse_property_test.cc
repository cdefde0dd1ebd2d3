// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "sparse_rig.h"

namespace usbyte {
namespace {

using test::Random;
using test::Rows;

struct Case {
  const char* name;
  /// Ids of a rank.
  std::function<std::vector<int64_t>(Random&, int64_t rows, int rank, int ranks)> ids;
};

std::vector<int64_t> drawn(Random& random, int64_t count, int64_t below) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count && below > 0; ++i) out.push_back(random(0, below - 1));
  return out;
}

std::vector<int64_t> run(int64_t begin, int64_t end) {
  std::vector<int64_t> out(static_cast<size_t>(std::max<int64_t>(end - begin, 0)));
  std::iota(out.begin(), out.end(), begin);
  return out;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"random", [](Random& random, int64_t rows, int,
                    int) { return drawn(random, random(0, 2 * rows), rows); }},
      {"a few", [](Random& random, int64_t rows, int, int) { return drawn(random, 3, rows); }},
      {"all in the first range",
       [](Random& random, int64_t rows, int, int ranks) {
         return drawn(random, rows, (rows + ranks - 1) / ranks);
       }},
      {"all equal", [](Random&, int64_t rows, int,
                       int) { return std::vector<int64_t>(static_cast<size_t>(rows), rows / 2); }},
      {"disjoint", [](Random&, int64_t rows, int rank,
                      int ranks) { return run(rows * rank / ranks, rows * (rank + 1) / ranks); }},
      {"only one rank", [](Random& random, int64_t rows, int rank,
                           int) { return drawn(random, rank == 0 ? rows : 0, rows); }},
      {"nothing", [](Random&, int64_t, int, int) { return std::vector<int64_t>(); }},
      {"everything", [](Random&, int64_t rows, int, int) { return run(0, rows); }},
      {"backwards",
       [](Random&, int64_t rows, int, int) {
         std::vector<int64_t> out = run(0, rows);
         std::ranges::reverse(out);
         return out;
       }},
      {"one row", [](Random&, int64_t rows, int rank,
                     int) { return std::vector<int64_t>(rank == 0 ? 1 : 0, rows - 1); }},
  };
  return all;
}

std::vector<Rows> draw(Random& random, const Case& c, const SparseShape& shape, int ranks) {
  std::vector<Rows> out(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    Rows& rows = out[static_cast<size_t>(r)];
    if (shape.rows > 0) rows.ids = c.ids(random, shape.rows, r, ranks);
    for (int64_t i = 0; i < std::ssize(rows.ids) * shape.width; ++i) {
      rows.values.push_back(static_cast<double>(random(0, 1)));
    }
  }
  return out;
}

class EverySparseScheme : public testing::TestWithParam<SparseScheme> {};

TEST_P(EverySparseScheme, EqualsTheDenseSum) {
  constexpr std::array kDTypes = {DType::float32,  DType::float64, DType::float16,
                                  DType::bfloat16, DType::int32,   DType::int64};
  for (const Case& c : cases()) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      SCOPED_TRACE(std::string(c.name) + ", seed " + std::to_string(seed));
      Random random(seed);
      const int ranks = static_cast<int>(random(1, 8));
      const SparseShape shape{random(0, 60), random(1, 5), kDTypes[seed % kDTypes.size()]};
      const std::vector<Rows> rows = draw(random, c, shape, ranks);
      const double scale = is_floating(shape.dtype) ? 0.5 : 1;
      const auto sums = test::all_reduce(GetParam(), shape, rows, {scale, seed});
      test::Reference want = test::reference(shape, rows);
      if (!GetParam().keeps_zeros) want = test::without_zeros(want);
      for (const SparseSum& sum : sums) test::expect_rows(shape, sum.rows, want, scale);
    }
  }
}

TEST_P(EverySparseScheme, IsTheSameToTheBitOnAllRanks) {
  Random random(3);
  const SparseShape shape{500, 3, DType::float32};
  std::vector<Rows> rows(5);
  std::normal_distribution<double> normal;
  for (Rows& r : rows) {
    r.ids = drawn(random, 300, shape.rows);
    for (size_t i = 0; i < 3 * r.ids.size(); ++i) r.values.push_back(normal(random.engine()));
  }
  const auto sums = test::all_reduce(GetParam(), shape, rows);
  const auto again = test::all_reduce(GetParam(), shape, rows);
  for (const auto* other : {&sums, &again}) {
    for (const SparseSum& sum : *other) {
      EXPECT_EQ(sum.rows.ids, sums[0].rows.ids);
      EXPECT_TRUE(std::ranges::equal(sum.rows.values.bytes(), sums[0].rows.values.bytes()));
    }
  }
}

TEST_P(EverySparseScheme, SendsWhatItsFormulaSays) {
  for (int ranks : {2, 3, 4, 8, 9}) {
    for (int64_t width : {1, 64, 300}) {
      for (int64_t one_in : {3, 50}) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks, 1 in " + std::to_string(one_in));
        Random random(static_cast<uint64_t>(ranks));
        const SparseShape shape{width == 1 ? 100'000 : 20'000, width, DType::float32};
        std::vector<Rows> rows(static_cast<size_t>(ranks));
        for (Rows& r : rows) {
          for (int64_t id = 0; id < shape.rows; ++id) {
            if (random.one_in(one_in)) r.ids.push_back(id);
          }
          r.values.assign(r.ids.size() * static_cast<size_t>(width), 1);
        }
        const double want = GetParam().bytes(ranks, shape, test::density_of(shape, rows));
        double busiest = 0;
        for (const SparseSum& sum : test::all_reduce(GetParam(), shape, rows)) {
          const SparseTraffic& t = sum.traffic;
          busiest = std::max({busiest, double(t.sent_bytes), double(t.received_bytes)});
          EXPECT_GT(t.own_rows, 0);
        }
        EXPECT_GT(busiest, 0.9 * want);
        EXPECT_LT(busiest, 1.2 * want);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, EverySparseScheme, testing::ValuesIn(sparse_schemes()),
                         [](const auto& scheme) { return std::string(scheme.param.name); });

}  // namespace
}  // namespace usbyte
