// SPDX-License-Identifier: Apache-2.0
// What Zen's sparse all_reduce takes of this machine: hashing, balance and memory.

#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <thread>

#include "bench.h"
#include "cuda/emulation/emulated_cuda.h"
#include "partition.h"
#include "sparse/partitioners.h"
#include "usbyte/error.h"
#include "usbyte/sparse.h"

namespace {

// Of this thread: a rank is one, and frees what it allocated.
thread_local int64_t live_bytes = 0, peak_bytes = 0;

void* counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  live_bytes += static_cast<int64_t>(malloc_usable_size(memory));
  peak_bytes = std::max(peak_bytes, live_bytes);
  return memory;
}

}  // namespace

// Not inlined, or GCC takes them for mismatched pairs.
[[gnu::noinline]] void* operator new(size_t size) { return counted(std::malloc(size)); }

[[gnu::noinline]] void* operator new(size_t size, std::align_val_t alignment) {
  const auto unit = static_cast<size_t>(alignment);
  return counted(std::aligned_alloc(unit, (size + unit - 1) / unit * unit));
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  live_bytes -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  operator delete(memory);
}

namespace {

using namespace usbyte;
using bench::fixed;
using bench::medians_in_turns;

constexpr const char* kAbout =
    "Adds up sparse gradients whose rows are drawn by Zipf's law; ranks are threads.\n\n"
    "  place, name   GB/s of row numbers of 8 bytes: which rank adds a row up, by which key, and\n"
    "                back; on one core, ascending; median\n"
    "  coalesce      GB/s of keys and values of one rank, in the order drawn; likewise\n"
    "  copy          GB/s of memcpy of the row numbers, measured in turns; likewise\n"
    "  gamma         rows of the sum over those of one rank\n"
    "  push, pull    the largest share of one rank, times the ranks: 1 is balance; by hashing\n"
    "                (zen) and by equal ranges (sparse_ps)\n"
    "  memory        the most that a rank has allocated at once, its result too, over the bytes "
    "of\n"
    "                keys and values of its own rows and the sum's; bitmaps are not taken off\n\n"
    "With --device or --emulated instead: groups batches of rows by server on the device, by\n"
    "hierarchical hashing, and checks each.\n\n"
    "  ids           spread: all over 2^40 rows; range: all next to each other, in any\n"
    "                order; equal: each eight times, with more room\n"
    "  load          rows over hashed slots\n"
    "  rows          in all batches\n"
    "  missed        rows whose hashed slots were all taken; published: what Zen's authors "
    "measured\n"
    "  imbalance     the largest share of one server, times the servers; the worst batch\n"
    "  unplaced      rows that were found to have no place\n"
    "  time          of a batch, on the device, launches and setting the table too; median\n"
    "  GB/s          of row numbers of 8 bytes\n"
    "  #lost         rows that are neither in the list of their server nor counted as unplaced, "
    "or\n"
    "                twice or wrongly in one; elements that are written and should not be\n\n"
    "Exit code: 0, 1 if anything is wrong, 2 on an error. 1 GB = 10^9 bytes.";

// None twice; by their frequency, as vocabularies are.
std::vector<int64_t> draw(const std::vector<double>& cumulative, int64_t count, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::uniform_real_distribution<double> uniform(0, cumulative.back());
  std::vector<bool> seen(cumulative.size());
  std::vector<int64_t> out;
  while (std::ssize(out) < count) {
    const auto at = std::ranges::upper_bound(cumulative, uniform(rng)) - cumulative.begin();
    const auto row = std::min(static_cast<size_t>(at), cumulative.size() - 1);
    if (!seen[row]) out.push_back(static_cast<int64_t>(row));
    seen[row] = true;
  }
  return out;
}

std::vector<double> zipf(int64_t rows, double exponent) {
  std::vector<double> out(static_cast<size_t>(rows));
  for (size_t i = 0; i < out.size(); ++i) out[i] = std::pow(static_cast<double>(i + 1), -exponent);
  std::partial_sum(out.begin(), out.end(), out.begin());
  return out;
}

struct Rates {
  double place, name, coalesce, copy;  // bytes/s
};

Rates measure(const SparseShape& shape, const std::vector<int64_t>& ids, int64_t iters) {
  const sparse::HashPartitioner servers(shape.rows, 4, 1);
  std::vector<int64_t> ascending = ids, copied(ids.size());
  std::ranges::sort(ascending);
  std::vector<sparse::Place> places(ids.size());
  const std::vector<float> values(ids.size() * static_cast<size_t>(shape.width), 1.0F);
  const RowsView rows{ids, reinterpret_cast<const std::byte*>(values.data())};
  const double key_bytes = static_cast<double>(ids.size() * sizeof(int64_t));
  const auto row_bytes = static_cast<double>(std::ssize(ids) * (shape.row_bytes() + 8));
  const std::function<void()> actions[] = {
      [&] {
        for (size_t i = 0; i < ids.size(); ++i) places[i] = servers.place(ascending[i]);
      },
      [&] {
        for (size_t i = 0; i < ids.size(); ++i) {
          ascending[i] = servers.id(places[i].server, places[i].key);
        }
      },
      [&] { coalesce(shape, rows); },
      [&] { std::memcpy(copied.data(), ids.data(), ids.size() * sizeof(int64_t)); }};
  const std::vector<double> times = medians_in_turns(actions, iters);
  const auto rate = [&](size_t a, double bytes) { return bytes / times[a]; };
  return {rate(0, key_bytes), rate(1, key_bytes), rate(2, row_bytes), rate(3, key_bytes)};
}

struct Balance {
  double push = 1, pull = 1, gamma = 1, memory = 0;
};

// The worst rank's.
Balance add_up(const char* scheme, const SparseShape& shape,
               const std::vector<std::vector<int64_t>>& ids) {
  const size_t ranks = ids.size();
  const auto exchanges = make_local_exchanges(static_cast<int>(ranks));
  std::vector<Balance> found(ranks);
  std::vector<std::exception_ptr> errors(ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        const std::vector<float> values(ids[r].size() * static_cast<size_t>(shape.width), 1.0F);
        const RowsView mine{ids[r], reinterpret_cast<const std::byte*>(values.data())};
        const int64_t before = live_bytes;
        peak_bytes = before;
        const SparseSum sum =
            sparse_scheme(scheme).all_reduce(*exchanges[r], shape, mine, {.seed = 1});
        const auto own = static_cast<double>(mine.ids.size());
        const auto all = static_cast<double>(sum.rows.count());
        found[r] = {sum.traffic.push_imbalance, sum.traffic.pull_imbalance, all / own,
                    static_cast<double>(peak_bytes - before) /
                        ((own + all) * static_cast<double>(shape.row_bytes() + 8))};
      } catch (...) {
        errors[r] = std::current_exception();
        exchanges[r]->abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  Balance out;
  for (const Balance& one : found) {
    out = {std::max(out.push, one.push), std::max(out.pull, one.pull), one.gamma,
           std::max(out.memory, one.memory)};
  }
  return out;
}

int bench_sparse(const bench::Options& options) {
  const bool emulated = options.integer("emulated") != 0;
  if (emulated || options.text("device") != "none") {
    const std::shared_ptr<Cuda> cuda = emulated
                                           ? std::shared_ptr<Cuda>(make_emulated_cuda())
                                           : make_cuda(static_cast<int>(options.integer("device")));
    return bench::bench_partition(options, *cuda,
                                  {options.integer("batch", 100), options.integer("batches", 1)});
  }
  const SparseShape shape{options.integer("rows", 2), options.integer("width", 1), DType::float32};
  const auto count =
      static_cast<int64_t>(options.real("density") * static_cast<double>(shape.rows));
  if (count < 1 || count > shape.rows) {
    throw UsageError("--density must leave from one to all of " + std::to_string(shape.rows) +
                     " rows; it is " + options.text("density"));
  }
  const std::vector<double> law = zipf(shape.rows, options.real("zipf"));
  const int64_t most = options.integer("max-ranks", 2);
  std::vector<std::vector<int64_t>> ids;
  for (int64_t r = 0; r < most; ++r) ids.push_back(draw(law, count, static_cast<uint64_t>(r) + 1));

  const Rates rates = measure(shape, ids[0], options.integer("iters", 1));
  const auto gb = [](double rate) { return fixed(rate * 1e-9, 2); };
  bench::print_table(options.table(),
                     {{"rows", "of", "place(GB/s)", "name(GB/s)", "coalesce(GB/s)", "copy(GB/s)"},
                      {std::to_string(count), std::to_string(shape.rows), gb(rates.place),
                       gb(rates.name), gb(rates.coalesce), gb(rates.copy)}});
  std::fputc('\n', options.table());
  std::vector<std::vector<std::string>> table = {
      {"ranks", "gamma", "scheme", "push", "pull", "memory"}};
  auto rows = nlohmann::ordered_json::array();
  const double limit = options.real("memory-limit");
  int64_t wrong = 0;
  for (int64_t ranks = 2; ranks <= most; ranks *= 2) {
    const std::vector<std::vector<int64_t>> some(ids.begin(), ids.begin() + ranks);
    for (const char* scheme : {"zen", "sparse_ps"}) {
      const Balance found = add_up(scheme, shape, some);
      if (limit > 0 && found.memory > limit) ++wrong;
      table.push_back({std::to_string(ranks), fixed(found.gamma, 2), scheme, fixed(found.push, 3),
                       fixed(found.pull, 3), fixed(found.memory, 2)});
      rows.push_back({{"ranks", ranks},
                      {"gamma", found.gamma},
                      {"scheme", scheme},
                      {"push_imbalance", found.push},
                      {"pull_imbalance", found.pull},
                      {"memory_share", found.memory}});
    }
  }
  const std::string ran = std::to_string(rows.size()) + " sums";
  return bench::finish(options, table, ran, "in memory", wrong,
                       {{"benchmark", "sparse"},
                        {"place_bytes_per_s", rates.place},
                        {"name_bytes_per_s", rates.name},
                        {"coalesce_bytes_per_s", rates.coalesce},
                        {"copy_bytes_per_s", rates.copy},
                        {"rows", std::move(rows)}});
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options(kAbout);
  options.flag("rows", "4000000", "of the matrix")
      .flag("width", "4", "elements of a row, float32")
      .flag("density", "0.025", "share of the rows that a rank has")
      .flag("zipf", "1", "exponent of the law")
      .flag("max-ranks", "64", "threads; 2, 4, 8, ... until so many")
      .flag("iters", "15", "timed calls")
      .flag("memory-limit", "4", "sums that take more are wrong; 0: none")
      .flag("device", "none", "ordinal of a GPU that partitions rows; none: the rest, on CPUs")
      .flag("emulated", "0", "1: the same on the host, whose times mean nothing")
      .flag("batch", "1000000", "rows that are partitioned at a time")
      .flag("batches", "100", "of the first line; the others have a tenth");
  return bench::run(std::move(options), argc, argv, bench_sparse);
}
