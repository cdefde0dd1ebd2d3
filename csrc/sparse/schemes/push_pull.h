// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "sparse/messages.h"

// Sums by push and pull: each row goes to its server, where equal ones meet, and each server sends
// its sums to all. `Servers` are those of partitioners.h.
namespace usbyte::sparse {

/// Lengths and messages, to the servers and from them.
inline int push_pull_transfers(int) { return 4; }

/// Shares of the rows of the fullest of equal ranges that are not zero: of one rank's gradient, and
/// of the sum. That is less skewed, as the fuller a range is, the more rows ranks have in common:
/// as many as if they were drawn independently, or more, but for what all ranges have on average.
struct FullestRange {
  FullestRange(int ranks, const SparseDensity& density)
      : of_one(std::min(1.0, density.of(1) * density.skew)),
        of_sum(std::max(density.of(ranks), std::min(density.of(ranks) * density.skew,
                                                    1 - std::pow(1 - of_one, ranks)))) {}

  double of_one, of_sum;
};

/// The rows as messages to their servers.
template <typename Servers>
Outbox push(const SparseShape& shape, const SparseRows& rows, const Servers& servers, int ranks) {
  std::vector<int64_t> counts(static_cast<size_t>(ranks));
  for (int64_t id : rows.ids) ++counts[static_cast<size_t>(servers.place(id).server)];
  Outbox out(shape, counts, [&](int server) { return servers.range(server); });
  const std::byte* row = rows.values.data();
  for (int64_t id : rows.ids) {
    const auto [server, key] = servers.place(id);
    out.put(server, key, row);
    row += shape.row_bytes();
  }
  return out;
}

/// Sends the rows to their servers, and returns this rank's message of the sums that it serves.
template <typename Servers>
Buffer add_up_pushed(Exchange& exchange, const SparseShape& shape, const Outbox& pushed,
                     const Servers& servers, bool bitmaps, SparseTraffic& traffic) {
  traffic.push_imbalance = pushed.imbalance();
  const int64_t range = servers.range(exchange.rank());
  const Inbox arrived(exchange, pushed, traffic);
  const Sums sums = add_up(shape, range, arrived.read(shape, [&](int) { return range; }));
  return write_set(shape, range, sums, bitmaps);
}

/// Sends this rank's sums to all, and returns all.
template <typename Servers>
SparseRows pull(Exchange& exchange, const SparseShape& shape, const Buffer& own,
                const Servers& servers, SparseTraffic& traffic) {
  const Inbox arrived(exchange, own, traffic);
  const std::vector<RowsMessage> parts =
      arrived.read(shape, [&](int server) { return servers.range(server); });
  traffic.pull_imbalance = imbalance(parts);

  std::vector<std::vector<int64_t>> ids(parts.size());
  std::vector<RowsMessage> named;
  for (size_t s = 0; s < parts.size(); ++s) {
    ids[s].resize(static_cast<size_t>(parts[s].count()));
    for (size_t i = 0; i < ids[s].size(); ++i) {
      ids[s][i] = servers.id(static_cast<int>(s), parts[s].keys[static_cast<int64_t>(i)]);
    }
    named.push_back({Keys(std::span<const int64_t>(ids[s])), parts[s].values, {}});
  }
  return rows_of(put_together(shape, shape.rows, named));
}

/// Push, sums at the servers, pull. With `bitmaps`, what is pulled may have one instead of keys.
template <typename Servers>
SparseSum push_pull(Exchange& exchange, const SparseShape& shape, SparseRows mine,
                    const Servers& servers, bool bitmaps) {
  SparseSum out;
  const Buffer own = [&] {
    const Outbox pushed = push(shape, std::exchange(mine, {}), servers, exchange.size());
    return add_up_pushed(exchange, shape, pushed, servers, bitmaps, out.traffic);
  }();
  out.rows = pull(exchange, shape, own, servers, out.traffic);
  return out;
}

}  // namespace usbyte::sparse
