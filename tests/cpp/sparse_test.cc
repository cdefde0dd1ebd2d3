// SPDX-License-Identifier: Apache-2.0
#include "usbyte/sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "sparse/partitioners.h"
#include "sparse_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::message_of;
using test::Random;
using test::Rows;

/// Ids that are as frequent as Zipf's law says, by rank 1 / (id + 1); none twice.
std::vector<int64_t> zipf(Random& random, int64_t rows, int64_t count) {
  std::uniform_real_distribution<double> uniform;
  std::vector<char> seen(static_cast<size_t>(rows));
  std::vector<int64_t> out;
  while (std::ssize(out) < count) {
    const double u = uniform(random.engine());
    const auto id = static_cast<int64_t>(std::pow(static_cast<double>(rows + 1), u)) - 1;
    if (!std::exchange(seen[static_cast<size_t>(id)], 1)) out.push_back(id);
  }
  return out;
}

TEST(Sparse, CoalescedRowsAscendAndAreSums) {
  const SparseShape shape{10, 2, DType::float32};
  const Rows rows{{7, 2, 7, 0}, {1, 2, 3, 4, 5, 6, 7, 8}};
  const Buffer values = test::packed(shape, rows);
  test::expect_rows(shape, coalesce(shape, {rows.ids, values.data()}),
                    {{0, {7, 8}}, {2, {3, 4}}, {7, {6, 8}}});
}

TEST(Sparse, IdsOutsideTheMatrixAreNamed) {
  const SparseShape shape{10, 1, DType::float32};
  const float value = 1;
  for (int64_t id : {int64_t{-1}, int64_t{10}, int64_t{1} << 40}) {
    const std::string what = message_of<UsageError>(
        [&] { coalesce(shape, {std::span(&id, 1), reinterpret_cast<const std::byte*>(&value)}); });
    EXPECT_NE(what.find("row " + std::to_string(id) + " is outside"), std::string::npos) << what;
  }
}

TEST(Sparse, IntegersAreNotScaled) {
  const SparseShape shape{10, 1, DType::int32};
  const auto alone = make_local_exchanges(1);
  EXPECT_THROW(sparse_scheme("zen").all_reduce(*alone[0], shape, {}, {0.5, 0}), UsageError);
}

TEST(Sparse, AveragesStayInsideTheRangeOfTheirType) {
  const SparseShape shape{10, 1, DType::float16};
  const std::vector<Rows> rows(8, Rows{{3}, {16'384}});  // whose sum is beyond 65504
  for (const SparseScheme& scheme : sparse_schemes()) {
    for (const SparseSum& sum : test::all_reduce(scheme, shape, rows, {1.0 / 8, 0})) {
      test::expect_rows(shape, sum.rows, {{3, {16'384}}});
    }
  }
}

TEST(Sparse, UnknownSchemesAreToldTheKnownOnes) {
  const std::string what = message_of<UsageError>([] { sparse_scheme("nez"); });
  EXPECT_NE(what.find("'nez'; known are zen"), std::string::npos) << what;
}

// Samples of an index space whose numbers need more than 32 bits.
TEST(Sparse, ManyMoreRowsThanFourBytesCount) {
  Random random(5);
  const SparseShape shape{(int64_t{1} << 33) + 11, 1, DType::float32};
  std::vector<Rows> rows(3);
  for (Rows& r : rows) {
    for (int i = 0; i < 1000; ++i) r.ids.push_back(random(0, shape.rows - 1));
    r.ids.push_back(shape.rows - 1);
    r.values.assign(r.ids.size(), 1);
  }
  for (const SparseSum& sum : test::all_reduce(sparse_scheme("zen"), shape, rows)) {
    test::expect_rows(shape, sum.rows, test::reference(shape, rows));
  }
}

/// Every row has one server and key, which name it, and every key below a server's range is a row.
template <typename Servers>
void expect_one_place_for_each_row(int64_t rows, int ranks, const Servers& servers) {
  SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(ranks) + " ranks");
  int64_t keys = 0, most = 0;
  std::set<std::pair<int, int64_t>> seen;
  for (int64_t id = 0; id < rows; ++id) {
    const auto [server, key] = servers.place(id);
    ASSERT_TRUE(server >= 0 && server < ranks && key >= 0 && key < servers.range(server));
    ASSERT_TRUE(seen.insert({server, key}).second);
    ASSERT_EQ(servers.id(server, key), id);
  }
  for (int r = 0; r < ranks; ++r) {
    keys += servers.range(r);
    most = std::max(most, servers.range(r));
  }
  EXPECT_EQ(keys, rows);
  EXPECT_EQ(most, (rows + ranks - 1) / ranks);
}

TEST(Servers, HaveEachRowOnce) {
  for (int64_t rows = 0; rows < 70; ++rows) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      expect_one_place_for_each_row(rows, ranks, sparse::RangePartitioner(rows, ranks));
      for (uint64_t seed : {0, 1, 2}) {
        expect_one_place_for_each_row(rows, ranks, sparse::HashPartitioner(rows, ranks, seed));
      }
    }
  }
}

// Rows that are a stride apart, which without a hash would be one server's, or a few ones'.
TEST(Servers, AreDealtRowsEvenlyAtAnyStride) {
  constexpr int kRanks = 8, kRows = 40'000;
  for (int64_t stride : {1, 2, 8, 64, 4096, 12'345}) {
    const sparse::HashPartitioner servers(kRows * stride, kRanks, 3);
    std::vector<int> counts(kRanks);
    int64_t last_key[kRanks] = {-1, -1, -1, -1, -1, -1, -1, -1};
    for (int64_t i = 0; i < kRows; ++i) {
      const auto [server, key] = servers.place(i * stride);
      ++counts[static_cast<size_t>(server)];
      EXPECT_GT(key, std::exchange(last_key[server], key));
    }
    // 5000 with a deviation of 66.
    EXPECT_LT(std::ranges::max(counts), 5350) << stride;
    EXPECT_GT(std::ranges::min(counts), 4650) << stride;
  }
}

TEST(Zen, IsBalancedWhereEqualRangesAreNot) {
  const SparseShape shape{500'000, 1, DType::float32};
  for (int ranks : {2, 8, 64}) {
    Random random(static_cast<uint64_t>(ranks));
    std::vector<Rows> rows(static_cast<size_t>(ranks));
    for (Rows& r : rows) {
      r.ids = zipf(random, shape.rows, 100'000);
      r.values.assign(r.ids.size(), 1);
    }
    std::vector<int64_t> in_range(rows.size());
    const int64_t range = (shape.rows + ranks - 1) / ranks;
    for (int64_t id : rows[0].ids) ++in_range[static_cast<size_t>(id / range)];
    const double skew = static_cast<double>(std::ranges::max(in_range)) * ranks / 100'000;
    EXPECT_GT(skew, 1.2);
    const auto sums = test::all_reduce(sparse_scheme("zen"), shape, rows, {1, 1});
    EXPECT_DOUBLE_EQ(sums[0].traffic.skew, skew);
    for (const SparseSum& sum : sums) {
      EXPECT_LE(sum.traffic.push_imbalance, 1.1);
      EXPECT_LE(sum.traffic.pull_imbalance, 1.1);
      EXPECT_EQ(sum.traffic.own_rows, 100'000);
      EXPECT_EQ(sum.traffic.sum_rows, sum.rows.count());
    }
  }
}

TEST(Zen, SendsWhatItsFormulaSays) {
  constexpr int kRanks = 4;
  const SparseShape shape{200'000, 16, DType::float32};
  Random random(2);
  std::vector<Rows> rows(kRanks);
  std::set<int64_t> all;
  for (Rows& r : rows) {
    r.ids = zipf(random, shape.rows, 10'000);
    r.values.assign(16 * r.ids.size(), 1);
    all.insert(r.ids.begin(), r.ids.end());
  }
  const double own = 0.05, sum = static_cast<double>(all.size()) / 200'000;
  const SparseScheme& zen = sparse_scheme("zen");
  const double want = zen.bytes(kRanks, shape, {{own, 0, 0, sum}});
  for (const SparseSum& got : test::all_reduce(zen, shape, rows)) {
    EXPECT_NEAR(static_cast<double>(got.traffic.sent_bytes), want, 0.05 * want);
    EXPECT_NEAR(static_cast<double>(got.traffic.received_bytes), want, 0.05 * want);
  }
}

TEST(EqualRanges, SendAboutWhatTheirFormulasSayUnderSkew) {
  constexpr int kRanks = 16;
  const SparseShape shape{20'000, 64, DType::float32};
  for (int64_t count : {200, 1'000, 4'000}) {
    SCOPED_TRACE(count);
    Random random(3);
    std::vector<Rows> rows(kRanks);
    for (Rows& r : rows) {
      r.ids = zipf(random, shape.rows, count);
      r.values.assign(r.ids.size() * static_cast<size_t>(shape.width), 1);
    }
    SparseDensity density = test::density_of(shape, rows);
    density.skew = test::all_reduce(sparse_scheme("zen"), shape, rows)[0].traffic.skew;
    EXPECT_GT(density.skew, 3);
    for (const char* name : {"sparse_ps", "omnireduce"}) {
      const SparseScheme& scheme = sparse_scheme(name);
      double busiest = 0;
      for (const SparseSum& sum : test::all_reduce(scheme, shape, rows)) {
        const SparseTraffic& t = sum.traffic;
        busiest = std::max({busiest, double(t.sent_bytes), double(t.received_bytes)});
      }
      const double want = scheme.bytes(kRanks, shape, density);
      EXPECT_GT(want, 0.9 * busiest) << name;
      EXPECT_LT(want, 1.6 * busiest) << name;
    }
  }
}

}  // namespace
}  // namespace usbyte
