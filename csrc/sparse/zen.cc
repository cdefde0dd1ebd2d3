#include <algorithm>
#include <utility>

#include "../codec/permutation.h"
#include "outbox.h"
#include "rows.h"
#include "schemes.h"

// Balanced parallelism (Zen, OSDI 2025). Push: every row goes to the server that its id hashes to,
// so that equal ids meet and each rank's rows are spread evenly, however they are skewed. Pull:
// each server sends the sums of its rows to all.
//
// The hash is a permutation of all ids, cut into equal runs, one for each server. So servers have
// the same number of ids, nobody needs a table of them, and a server's bitmap has one bit for each.
namespace usbyte::sparse {
namespace {

struct Servers {
  Servers(int64_t all_rows, int ranks) : rows(all_rows), run((rows + ranks - 1) / ranks) {}

  int of(uint64_t hashed) const { return static_cast<int>(hashed / static_cast<uint64_t>(run)); }
  int64_t begin(int server) const { return std::min(server * run, rows); }
  /// How many ids hash to a server.
  int64_t range(int server) const { return begin(server + 1) - begin(server); }

  int64_t rows, run;
};

/// Rows by the server they go to; a rank's own too.
Outbox push(const SparseShape& shape, const SparseRows& rows, const Permutation& hash,
            const Servers& servers, int ranks) {
  std::vector<uint64_t> hashed(rows.ids.begin(), rows.ids.end());
  hash.apply(hashed);
  std::vector<int64_t> counts(static_cast<size_t>(ranks));
  for (uint64_t h : hashed) ++counts[static_cast<size_t>(servers.of(h))];
  Outbox out(shape, counts, [&](int server) { return servers.range(server); });
  const std::byte* row = rows.values.data();
  for (uint64_t h : hashed) {
    const int server = servers.of(h);
    out.put(server, static_cast<int64_t>(h) - servers.begin(server), row);
    row += shape.row_bytes();
  }
  return out;
}

SparseSum all_reduce(Exchange& exchange, const SparseShape& shape, RowsView mine,
                     const SparseOptions& options) {
  const int ranks = exchange.size(), rank = exchange.rank();
  const Servers servers(shape.rows, ranks);
  const Permutation hash(options.seed, static_cast<uint64_t>(shape.rows));
  SparseSum out;

  Sums own;
  {
    const Outbox pushed = push(shape, coalesce(shape, mine), hash, servers, ranks);
    out.traffic.push_imbalance = pushed.imbalance();
    const Inbox arrived(exchange, pushed, out.traffic);
    own = add_up(shape, servers.range(rank),
                 arrived.read(shape, [&](int) { return servers.range(rank); }));
  }
  scale(shape, own.values, options.scale);

  const Buffer pulled = write_set(shape, servers.range(rank), own.set, own.values.data());
  own = {};
  const Inbox arrived(exchange, pulled, out.traffic);
  const std::vector<RowsMessage> parts =
      arrived.read(shape, [&](int server) { return servers.range(server); });
  out.traffic.pull_imbalance = imbalance(parts);

  std::vector<std::vector<uint64_t>> ids(parts.size());
  std::vector<RowsMessage> found;
  for (size_t s = 0; s < parts.size(); ++s) {
    const auto begin = static_cast<uint64_t>(servers.begin(static_cast<int>(s)));
    ids[s].resize(static_cast<size_t>(parts[s].count()));
    for (size_t i = 0; i < ids[s].size(); ++i) {
      ids[s][i] = begin + static_cast<uint64_t>(parts[s].keys[static_cast<int64_t>(i)]);
    }
    hash.invert(ids[s]);
    found.push_back({Keys(std::span<const uint64_t>(ids[s])), parts[s].values, {}});
  }
  out.rows = rows_of(put_together(shape, shape.rows, found));
  return out;
}

/// 2 (n - 1) / n (1 + gamma_n) d M b with keys; (n - 1) / n (d + d_n + bits) for what is shorter.
double bytes(int ranks, const SparseShape& shape, const SparseDensity& density) {
  const double n = ranks, rows = static_cast<double>(shape.rows);
  const double row = static_cast<double>(shape.row_bytes());
  const double key = static_cast<double>(Keys::width(shape.rows));
  const double push = density.of(1) * rows * (row + key);
  const double pull =
      density.of(ranks) * rows * row + std::min(density.of(ranks) * rows * key, rows / 8);
  return (n - 1) / n * (push + pull);
}

}  // namespace

const SparseScheme kZen = {"zen", all_reduce, bytes};

}  // namespace usbyte::sparse
