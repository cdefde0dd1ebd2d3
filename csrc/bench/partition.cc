// SPDX-License-Identifier: Apache-2.0
#include "partition.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <vector>

#include "codec/random.h"
#include "device.h"
#include "sparse/partitioners.h"

namespace usbyte::bench {
namespace {

constexpr int64_t kRows = int64_t{1} << 40;
constexpr int64_t kEqual = 8;
constexpr double kPublished[] = {21.3, 7.5, 3.0, 1.2};  // %, of rows that miss k slots at load 0.5

enum class Ids { spread, range, equal };
constexpr const char* kNames[] = {"spread", "range", "equal"};

struct Case {
  Ids ids;
  int servers;
  int32_t hashes;
  int64_t batches;
  double load;  // rows over slots
};

struct Found {
  std::vector<double> times;  // s
  int64_t rows = 0, missed = 0, unplaced = 0, lost = 0;
  double imbalance = 0;
};

std::vector<int64_t> draw(Ids kind, int64_t count, uint64_t seed) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), static_cast<int64_t>(seed) * count);
  for (size_t i = 0; i < out.size(); ++i) {
    if (kind == Ids::spread)
      out[i] = static_cast<int64_t>(mix(static_cast<uint64_t>(out[i])) >> 24);
    if (kind == Ids::range) std::swap(out[i], out[mix(seed + i) % (i + 1)]);
    if (kind == Ids::equal) out[i] /= kEqual;
  }
  return out;
}

RowPartition shape_of(const Case& what, int64_t batch) {
  auto out = RowPartition::of(kRows, what.servers, 1, batch);
  out.hashes = what.hashes;
  out.slots = static_cast<int64_t>(static_cast<double>(batch) / what.load) / what.servers + 1;
  // The published tenth has no room for what a single hash lets through, nor for equal ids.
  const int64_t share = what.ids == Ids::equal ? 1 : what.hashes == 1 ? 5 : 10;
  out.serial = std::max<int64_t>(out.slots / share, 32);
  return out;
}

class Bench {
 public:
  Bench(Cuda& cuda, int64_t batch, const Case& what)
      : cuda_(cuda), what_(what), batch_(batch), shape_(shape_of(what, batch)), stream_(cuda) {}

  Found run() {
    Found out;
    for (int64_t b = -1; b < what_.batches; ++b) {
      const std::vector<int64_t> given = draw(what_.ids, batch_, static_cast<uint64_t>(b + 1));
      const double time_s = partition(given);
      if (b < 0) continue;  // warm-up
      out.times.push_back(time_s);
      check(given, out);
    }
    return out;
  }

 private:
  static constexpr int64_t kGuard = 64;  // elements behind each array that must stay as they are
  static constexpr int32_t kUntouched = -77;

  // Elements with guards behind, and a copy of them on the host.
  template <typename T>
  struct Array {
    Array(Cuda& cuda, int64_t size)
        : host(static_cast<size_t>(size + kGuard)),
          memory(cuda, (size + kGuard) * static_cast<int64_t>(sizeof(T))) {}

    T* data() const { return reinterpret_cast<T*>(memory.data()); }
    size_t bytes() const { return host.size() * sizeof(T); }
    /// Those from `begin` on that are not as they were.
    int64_t touched(int64_t begin) const {
      return std::count_if(host.begin() + begin, host.end(), [](T v) { return v != kUntouched; });
    }

    std::vector<T> host;
    Allocation memory;
  };

  double partition(const std::vector<int64_t>& given) {
    // What an earlier batch has left must not be taken for this one's.
    clear(ids_, DType::int64);
    clear(positions_, DType::int32);
    clear(table_, DType::int32);
    clear(tallies_, DType::int32);
    cuda_.copy(given_.data(), given.data(), given.size() * sizeof(int64_t), stream_);
    cuda_.synchronize(stream_);
    stream_.mark(0);
    cuda_.partition_rows(shape_, given_.data(), nullptr, batch_, table_.data(),
                         {ids_.data(), positions_.data(), tallies_.data()}, stream_);
    stream_.mark(1);
    fetch(ids_);
    fetch(positions_);
    fetch(table_);
    fetch(tallies_);
    cuda_.synchronize(stream_);
    return stream_.between(0, 1);
  }

  template <typename T>
  void clear(const Array<T>& array, DType dtype) {
    cuda_.fill(array.data(), dtype, std::ssize(array.host), kUntouched, stream_);
  }
  template <typename T>
  void fetch(Array<T>& array) {
    cuda_.copy(array.host.data(), array.data(), array.bytes(), stream_);
  }

  void check(const std::vector<int64_t>& given, Found& out) const {
    const sparse::HashPartitioner servers(kRows, shape_.servers, shape_.seed);
    const std::vector<int32_t>& tallies = tallies_.host;
    std::vector<bool> seen(given.size());
    int64_t right = 0, at = 0, most = 0, listed = 0;
    for (int s = 0; s < shape_.servers; ++s) {
      const int64_t count = tallies[1 + static_cast<size_t>(s)];
      const int64_t end = std::min(at + count, batch_);
      most = std::max(most, count);
      listed += count;
      for (; at < end; ++at) {
        const auto i = static_cast<size_t>(at);
        const auto position = static_cast<size_t>(positions_.host[i]);
        if (position >= given.size() || seen[position]) continue;
        seen[position] = true;
        const int64_t id = ids_.host[i];
        right += id == given[position] && servers.place(id).server == s;
      }
      out.missed += tallies[1 + static_cast<size_t>(shape_.servers + s)];
    }
    out.rows += batch_;
    out.unplaced += tallies[0];
    // Neither listed rightly nor counted, or counted twice; written where nothing is.
    out.lost += std::abs(batch_ - listed - tallies[0]) + (listed - right) + ids_.touched(at) +
                positions_.touched(at) + table_.touched(shape_.table_size()) +
                tallies_.touched(shape_.tallies_size());
    const double share = static_cast<double>(most) / static_cast<double>(std::max<int64_t>(at, 1));
    out.imbalance = std::max(out.imbalance, share * what_.servers);
  }

  Cuda& cuda_;
  const Case what_;
  const int64_t batch_;
  const RowPartition shape_;
  Stream stream_;
  Array<int64_t> given_{cuda_, batch_}, ids_{cuda_, batch_};
  Array<int32_t> positions_{cuda_, batch_}, table_{cuda_, shape_.table_size()},
      tallies_{cuda_, shape_.tallies_size()};
};

}  // namespace

int bench_partition(const Options& options, Cuda& cuda, const PartitionWork& work) {
  const int64_t few = std::max<int64_t>(work.batches / 10, 1);
  std::vector<Case> cases = {{Ids::spread, 16, 3, work.batches, 0.5},
                             {Ids::range, 16, 3, few, 0.5},
                             {Ids::equal, 16, 3, few, 0.5}};
  for (int servers : {1, 4, 64}) cases.push_back({Ids::spread, servers, 3, few, 0.5});
  for (int32_t hashes : {1, 2, 4}) cases.push_back({Ids::spread, 16, hashes, few, 0.5});
  cases.push_back({Ids::spread, 16, 3, few, 4});  // does not fit

  std::vector<std::vector<std::string>> table = {
      {"ids", "servers", "hashes", "load", "rows", "missed(%)", "published(%)", "imbalance",
       "unplaced", "time(us)", "Mrows/s", "GB/s", "#lost"}};
  auto rows = nlohmann::ordered_json::array();
  int64_t wrong = 0;
  for (const Case& what : cases) {
    const char* const name = kNames[static_cast<size_t>(what.ids)];
    const Found found = Bench(cuda, work.batch, what).run();
    const bool fits = what.load <= 0.5, published = fits && what.ids != Ids::equal;
    // Nothing must have been too much for what fits, and something for what does not.
    const int64_t lost = found.lost + (fits ? found.unplaced : found.unplaced == 0);
    const double missed = 100 * static_cast<double>(found.missed) / static_cast<double>(found.rows);
    const double time_s = percentile(found.times, 0.5);
    const double rate = static_cast<double>(work.batch) / time_s;
    wrong += lost;
    table.push_back({name, std::to_string(what.servers), std::to_string(what.hashes),
                     fixed(what.load, 1), std::to_string(found.rows), fixed(missed, 2),
                     published ? fixed(kPublished[what.hashes - 1], 1) : "-",
                     fixed(found.imbalance, 3), std::to_string(found.unplaced),
                     fixed(1e6 * time_s, 1), fixed(1e-6 * rate, 0), fixed(8e-9 * rate, 2),
                     std::to_string(lost)});
    rows.push_back({{"ids", name},
                    {"servers", what.servers},
                    {"hashes", what.hashes},
                    {"load", what.load},
                    {"rows", found.rows},
                    {"missed_share", missed / 100},
                    {"imbalance", found.imbalance},
                    {"unplaced", found.unplaced},
                    {"time_s", time_s},
                    {"rows_per_s", rate},
                    {"lost", lost}});
  }
  const std::string ran = "partitions of " + std::to_string(work.batch) + " rows";
  return finish(options, table, ran, "rows", wrong,
                {{"benchmark", "partition"}, {"rows", std::move(rows)}});
}

}  // namespace usbyte::bench
