// SPDX-License-Identifier: Apache-2.0
#include "comm/local_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>

#include "ranks.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Pending;
using test::Random;
using Communicators = std::vector<std::unique_ptr<Communicator>>;
using Bytes = std::vector<std::byte>;

template <typename T>
T fold(T a, T b, ReduceOp op) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    if (op == ReduceOp::sum) return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    if (op == ReduceOp::product) return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
  switch (op) {
    case ReduceOp::sum:
      return a + b;
    case ReduceOp::product:
      return a * b;
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      break;
  }
  return std::max(a, b);
}

// One random collective: what every rank passes and what it must find afterwards.
struct Case {
  Collective kind;
  DType dtype;
  ReduceOp reduce;
  int root;
  std::vector<int64_t> counts;
  std::vector<std::vector<Bytes>> in;  // by rank, by span
};

void fill(Random& random, DType dtype, Bytes& bytes) {
  const auto width = static_cast<size_t>(itemsize(dtype));
  for (size_t i = 0; i < bytes.size(); i += width) {
    const double real = static_cast<double>(random(-1'000'000, 1'000'000)) / 997;
    const float single = static_cast<float>(real);
    const auto integer = static_cast<uint64_t>(
        random(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
    const void* source = dtype == DType::float64   ? static_cast<const void*>(&real)
                         : dtype == DType::float32 ? static_cast<const void*>(&single)
                                                   : static_cast<const void*>(&integer);
    std::memcpy(&bytes[i], source, width);
  }
}

Case random_case(Random& random, int size) {
  constexpr DType kReducible[] = {DType::float32, DType::float64, DType::int32, DType::int64};
  Case c{};
  c.kind = static_cast<Collective>(random(0, 5));
  c.reduce = static_cast<ReduceOp>(random(0, 3));
  c.root = static_cast<int>(random(0, size - 1));
  c.dtype = c.kind <= Collective::reduce_scatter ? kReducible[random(0, 3)]
                                                 : static_cast<DType>(random(0, 7));
  if (c.kind == Collective::all_to_all) {
    c.counts = {random(0, 40) * size};
  } else if (c.kind != Collective::barrier) {
    for (int64_t s = random(1, 4); s > 0; --s) {
      c.counts.push_back(random.one_in(8) ? random(5000, 20'000) : random(0, 3 * size));
    }
  }
  for (int r = 0; r < size; ++r) {
    std::vector<Bytes> spans;
    for (int64_t n : c.counts) {
      spans.emplace_back(static_cast<size_t>(n * itemsize(c.dtype)));
      fill(random, c.dtype, spans.back());
    }
    c.in.push_back(std::move(spans));
  }
  return c;
}

template <typename T>
Bytes fold_ranks(const Case& c, size_t span) {
  Bytes out = c.in[0][span];
  for (size_t r = 1; r < c.in.size(); ++r) {
    for (size_t i = 0; i < out.size(); i += sizeof(T)) {
      T a, b;
      std::memcpy(&a, &out[i], sizeof(T));
      std::memcpy(&b, &c.in[r][span][i], sizeof(T));
      a = fold(a, b, c.reduce);
      std::memcpy(&out[i], &a, sizeof(T));
    }
  }
  return out;
}

Bytes fold_ranks(const Case& c, size_t span) {
  switch (c.dtype) {
    case DType::float32:
      return fold_ranks<float>(c, span);
    case DType::float64:
      return fold_ranks<double>(c, span);
    case DType::int32:
      return fold_ranks<int32_t>(c, span);
    default:
      return fold_ranks<int64_t>(c, span);
  }
}

// The serial reference. Checks only the part of `got` that is defined.
void expect_result(const Case& c, int rank, size_t span, const Bytes& got) {
  const int size = static_cast<int>(c.in.size());
  const int64_t width = itemsize(c.dtype), count = c.counts[span];
  const auto expect = [&](const Bytes& want, Block range) {
    EXPECT_TRUE(std::equal(got.begin() + range.begin * width, got.begin() + range.end * width,
                           want.begin() + range.begin * width))
        << name(c.kind) << " " << name(c.dtype) << " rank " << rank << " of " << size << " span "
        << span << " of " << count;
  };
  const Block whole{0, count};
  if (c.kind == Collective::all_reduce) expect(fold_ranks(c, span), whole);
  if (c.kind == Collective::reduce_scatter) expect(fold_ranks(c, span), shard(whole, rank, size));
  if (c.kind == Collective::broadcast) expect(c.in[static_cast<size_t>(c.root)][span], whole);
  for (int r = 0; r < size && c.kind == Collective::all_gather; ++r) {
    expect(c.in[static_cast<size_t>(r)][span], shard(whole, r, size));
  }
  if (c.kind != Collective::all_to_all) return;
  const auto chunk = count / size * width;
  for (int r = 0; r < size; ++r) {
    const Bytes& sent = c.in[static_cast<size_t>(r)][0];
    EXPECT_TRUE(std::equal(got.begin() + r * chunk, got.begin() + (r + 1) * chunk,
                           sent.begin() + rank * chunk))
        << "all_to_all rank " << rank << " chunk " << r;
  }
}

class EveryRankCount : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(LocalCommunicator, EveryRankCount, testing::Range(1, 9));

TEST_P(EveryRankCount, RandomCollectivesEqualTheSerialReference) {
  const int size = GetParam();
  Random random(static_cast<uint64_t>(size));
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.push_back(random_case(random, size));
  Communicators ranks = make_local_communicators(size);
  on_each_rank(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    EXPECT_EQ(ranks[r]->rank(), rank);
    EXPECT_EQ(ranks[r]->size(), size);
    std::vector<std::vector<Bytes>> memory;
    std::vector<Bytes> sent;
    std::vector<Pending> pending;
    for (size_t i = 0; i < cases.size(); ++i) {
      memory.push_back(cases[i].in[r]);
      sent.push_back(memory.back().empty() ? Bytes() : memory.back()[0]);
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      Request request{c.kind, c.dtype, c.reduce, c.root, {}, {}};
      for (size_t s = 0; s < c.counts.size(); ++s) {
        request.recv.push_back({memory[i][s].data(), c.counts[s]});
      }
      // Half of the exchanges are in place; ranks need not do the same.
      if (c.kind == Collective::all_to_all) {
        request.send = {(i + r) % 2 ? request.recv[0] : BufferView{sent[i].data(), c.counts[0]}};
      }
      if (i % 3 == 0) {
        ranks[r]->run(request);
      } else {
        pending.emplace_back(*ranks[r], request);
      }
    }
    for (Pending& p : pending) p.get();
    for (size_t i = 0; i < cases.size(); ++i) {
      for (size_t s = 0; s < memory[i].size(); ++s) {
        expect_result(cases[i], rank, s, memory[i][s]);
      }
    }
  });
}

TEST_P(EveryRankCount, MinAndMaxPropagateNan) {
  const int size = GetParam();
  Communicators ranks = make_local_communicators(size);
  for (ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    on_each_rank(size, [&](int rank) {
      for (int bad = 0; bad < size; ++bad) {
        float value = rank == bad ? std::nanf("") : static_cast<float>(rank);
        ranks[static_cast<size_t>(rank)]->run(
            {Collective::all_reduce, DType::float32, op, 0, {}, {{&value, 1}}});
        EXPECT_TRUE(std::isnan(value)) << "rank " << rank << ", NaN from " << bad;
      }
    });
  }
}

}  // namespace
}  // namespace usbyte
