// SPDX-License-Identifier: Apache-2.0
// Rows of a device that are dealt out there: the messages and sums of the host, whatever is late.

#include "engine/sparse/device_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "device_training.h"
#include "sparse/schemes/push_pull.h"
#include "sparse_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;
using test::Random;

constexpr uint64_t kSeed = 5;

/// Rows, none twice, on a device and on the host.
struct DeviceBatch {
  DeviceBatch(const std::shared_ptr<Cuda>& cuda, const SparseShape& s, std::vector<int64_t> given,
              int64_t unused = 0)
      : shape(s),
        ids(std::move(given)),
        room(std::ssize(ids) + unused),
        values(static_cast<size_t>(std::ssize(ids) * shape.row_bytes())),
        memory(cuda, 8 + room * (8 + shape.row_bytes())) {
    for (size_t i = 0; i < values.size() / static_cast<size_t>(itemsize(shape.dtype)); ++i) {
      test::store(values.data() + i * static_cast<size_t>(itemsize(shape.dtype)), shape.dtype,
                  static_cast<double>(i % 1999) / 7 - 99);
    }
  }

  // As a kernel does, from which on the rows are there.
  void write(EmulatedCuda& cuda, CudaStream stream) {
    cuda.enqueue(stream, [this] {
      const int64_t count = std::ssize(ids);
      std::memcpy(memory.data(), &count, 8);
      std::memcpy(memory.data() + 8, ids.data(), ids.size() * 8);
      std::memcpy(memory.data() + 8 + 8 * room, values.data(), values.size());
    });
  }
  GivenRows given() const {
    const auto* const words = reinterpret_cast<const int64_t*>(memory.data());
    return {{{words + 1, static_cast<size_t>(room)}, memory.data() + 8 + 8 * room}, words};
  }
  RowsView on_host() const { return {ids, values.data()}; }

  const SparseShape shape;
  const std::vector<int64_t> ids;
  const int64_t room;
  std::vector<std::byte> values;
  const test::DeviceBytes memory;
};

std::vector<int64_t> ascending(Random& random, int64_t rows, int64_t count) {
  std::vector<int64_t> out;
  while (std::ssize(out) < count) {
    for (int64_t i = std::ssize(out); i < count; ++i) out.push_back(random(0, rows - 1));
    std::ranges::sort(out);
    out.erase(std::ranges::unique(out).begin(), out.end());
  }
  return out;
}

/// Rows that all go to one rank.
std::vector<int64_t> crowd(const SparseShape& shape, int ranks, int rank, int64_t count) {
  const sparse::HashPartitioner servers(shape.rows, ranks, kSeed);
  std::vector<int64_t> out;
  for (int64_t key = 0; key < count; ++key) out.push_back(servers.id(rank, key));
  std::ranges::sort(out);
  return out;
}

/// One rank's device.
struct DeviceRig {
  explicit DeviceRig(uint64_t seed = 0, double most_delay_s = 0)
      : cuda(make_emulated_cuda({.most_delay_s = most_delay_s, .seed = seed})),
        stream(cuda, false),
        order{{cuda->create_event(EventKind::ordering)},
              cuda->create_event(EventKind::ordering),
              cuda->create_event(EventKind::ordering)},
        rows(std::make_unique<DeviceRows>(cuda)) {}
  ~DeviceRig() {
    rows.reset();
    for (CudaEvent event : {order.after[0], order.started, order.done}) cuda->destroy(event);
  }

  void begin(DeviceBatch& batch) {
    batch.write(*cuda, stream.get());
    cuda->record(order.after[0], stream.get());
    rows->begin(order);
  }

  const std::shared_ptr<EmulatedCuda> cuda;
  const OwnedStream stream;
  const StreamOrder order;
  std::unique_ptr<DeviceRows> rows;
};

using Message = std::map<int64_t, std::vector<std::byte>>;  // a row's bytes by its key

Message read(const SparseShape& shape, const sparse::Outbox& box, int rank, int64_t range) {
  const sparse::RowsMessage got = sparse::read(box.message(rank), shape, range, rank);
  Message out;
  for (int64_t i = 0; i < got.count(); ++i) {
    const std::byte* const row = got.values + i * shape.row_bytes();
    EXPECT_TRUE(out.emplace(got.keys[i], std::vector(row, row + shape.row_bytes())).second);
  }
  return out;
}

TEST(DeviceRows, DealsRowsOutAsTheHostDoes) {
  Random random(1);
  DeviceRig rig(1, 1e-4);
  const SparseOptions options{0.3, kSeed};
  for (int round = 0; round < 60; ++round) {
    constexpr DType kTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
    const SparseShape shape{random(2000, 9000), random(1, 9), kTypes[round % 4]};
    const int ranks = static_cast<int>(random(1, 9));
    DeviceBatch batch(rig.cuda, shape, ascending(random, shape.rows, random(0, 700)),
                      random.one_in(2) ? 0 : random(0, 300));
    rig.begin(batch);
    const std::optional<PartitionedRows> dealt =
        rig.rows->partition(batch.given(), shape, ranks, options);
    ASSERT_TRUE(dealt) << round;

    SparseRows mine = coalesce(shape, batch.on_host());
    sparse::scale(shape, mine.values, options.scale);
    const sparse::HashPartitioner servers(shape.rows, ranks, kSeed);
    const sparse::Outbox want = sparse::push(shape, mine, servers, ranks);
    EXPECT_EQ(dealt->messages().imbalance(), want.imbalance());
    for (int r = 0; r < ranks; ++r) {
      ASSERT_EQ(read(shape, dealt->messages(), r, servers.range(r)),
                read(shape, want, r, servers.range(r)))
          << "round " << round << ", message to rank " << r;
    }
  }
}

TEST(DeviceRows, LeavesToTheHostWhatFindsNoPlace) {
  DeviceRig rig;
  const SparseShape shape{100000, 3, DType::float32};
  DeviceBatch batch(rig.cuda, shape, crowd(shape, 4, 2, 4000), 10);
  rig.begin(batch);
  EXPECT_FALSE(rig.rows->partition(batch.given(), shape, 4, {1, kSeed}));
  const RowsView rows = rig.rows->fetch(batch.given(), shape.row_bytes());
  EXPECT_TRUE(std::ranges::equal(rows.ids, batch.ids));
  EXPECT_EQ(std::memcmp(rows.values, batch.values.data(), batch.values.size()), 0);
}

TEST(DeviceRows, LeavesToTheHostWhatMakesNoSense) {
  DeviceRig rig;
  const SparseShape shape{100, 1, DType::float32};
  DeviceBatch outside(rig.cuda, shape, {3, 7, 100});
  rig.begin(outside);
  EXPECT_FALSE(rig.rows->partition(outside.given(), shape, 4, {1, kSeed}));
  const RowsView rows = rig.rows->fetch(outside.given(), shape.row_bytes());
  EXPECT_NE(message_of<UsageError>([&] { coalesce(shape, rows); }).find("row 100"),
            std::string::npos);

  DeviceBatch batch(rig.cuda, shape, {3, 7});
  rig.begin(batch);
  GivenRows given = batch.given();
  given.rows.ids = given.rows.ids.first(1);  // fewer than are counted
  EXPECT_FALSE(rig.rows->partition(given, shape, 4, {1, kSeed}));
  EXPECT_NE(message_of<FaultError>([&] { rig.rows->fetch(given, 4); }).find("counts 2 rows"),
            std::string::npos);
}

TEST(DeviceRows, WaitsNoLongerForADeviceOnceItIsHalted) {
  DeviceRig rig;
  const SparseShape shape{100, 1, DType::float32};
  DeviceBatch batch(rig.cuda, shape, {3, 7});
  rig.begin(batch);
  rig.rows->cancel();
  EXPECT_THROW(rig.rows->partition(batch.given(), shape, 4, {}), FaultError);
  EXPECT_THROW(rig.rows->begin(rig.order), FaultError);
  rig.rows.reset();  // what it has launched reads the batch
}

TEST(PartitionedRows, RefusesARowOfAnotherRankOrOfNone) {
  const SparseShape shape{100, 1, DType::float32};
  const auto named = [&](std::vector<int64_t> counts, std::vector<int64_t> ids) {
    PartitionedRows dealt(shape, kSeed, counts, {});
    return message_of<FaultError>([&] { dealt.name(ids); });
  };
  const sparse::HashPartitioner servers(shape.rows, 2, kSeed);
  const std::string other = named({1, 1}, {servers.id(1, 3), servers.id(0, 3)});
  EXPECT_NE(other.find("to rank 0, where rank 1"), std::string::npos) << other;
  for (int64_t id : {int64_t{-1}, int64_t{100}, int64_t{987654321}}) {
    const std::string none = named({1}, {id});
    EXPECT_NE(none.find("row " + std::to_string(id) + " of 100 to rank 0:"), std::string::npos);
  }
}

TEST(DeviceRows, LeavesToTheHostWhatMustBeThereTwice) {
  DeviceRig rig;
  const SparseShape shape{8, 1, DType::float32};
  DeviceBatch batch(rig.cuda, shape, std::vector<int64_t>(9, 3));
  rig.begin(batch);
  EXPECT_FALSE(rig.rows->partition(batch.given(), shape, 4, {1, kSeed}));
}

TEST(SparseScheme, SaysWhetherItDealsRowsOut) {
  const auto alone = make_local_exchanges(1);
  const SparseShape shape{10, 1, DType::float32};
  const PartitionedRows none(shape, kSeed, std::vector<int64_t>{0}, {});
  EXPECT_EQ(sparse_scheme("zen").all_reduce_partitioned(*alone[0], shape, none).rows.count(), 0);
  EXPECT_NE(message_of<UsageError>([&] {
              sparse_scheme("agsparse").all_reduce_partitioned(*alone[0], shape, none);
            }).find("'agsparse'"),
            std::string::npos);
}

// Some ranks' rows are dealt out by their devices, others' by the host, as they crowd.
TEST(DeviceRows, SumsAreThoseOfTheHost) {
  const SparseScheme& zen = sparse_scheme("zen");
  const SparseOptions options{0.7, kSeed};
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const int size = 1 + static_cast<int>(seed % 4);
    constexpr DType kTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
    const SparseShape shape{30000, 1 + static_cast<int64_t>(seed % 5), kTypes[seed / 4 % 4]};
    const auto first = test::shared_exchanges(size), second = test::shared_exchanges(size);
    on_each_rank(size, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      Random random(10 * seed + r);
      DeviceRig rig(seed + r, seed % 2 ? 1e-4 : 0);
      const bool crowds = size > 1 && (seed + r) % 3 == 0;
      DeviceBatch batch(
          rig.cuda, shape,
          crowds ? crowd(shape, size, rank, 3000) : ascending(random, shape.rows, random(0, 3000)));
      const SparseSum want = zen.all_reduce(*first[r], shape, batch.on_host(), options);
      rig.begin(batch);
      const std::optional<PartitionedRows> dealt =
          rig.rows->partition(batch.given(), shape, size, options);
      EXPECT_NE(dealt.has_value(), crowds);
      const SparseSum got =
          dealt ? zen.all_reduce_partitioned(*second[r], shape, *dealt)
                : zen.all_reduce(*second[r], shape,
                                 rig.rows->fetch(batch.given(), shape.row_bytes()), options);
      ASSERT_EQ(got.rows.ids, want.rows.ids);
      ASSERT_TRUE(std::ranges::equal(got.rows.values.bytes(), want.rows.values.bytes()));
      const SparseTraffic &a = got.traffic, &b = want.traffic;
      EXPECT_EQ(a.sent_bytes, b.sent_bytes);
      EXPECT_EQ(a.received_bytes, b.received_bytes);
      EXPECT_EQ(a.own_rows, b.own_rows);
      EXPECT_EQ(a.sum_rows, b.sum_rows);
      EXPECT_EQ(a.skew, b.skew);
      EXPECT_EQ(a.push_imbalance, b.push_imbalance);
      EXPECT_EQ(a.pull_imbalance, b.pull_imbalance);
    });
  }
}

}  // namespace
}  // namespace usbyte
