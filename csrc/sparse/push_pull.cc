#include "push_pull.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "../codec/permutation.h"
#include "mail.h"

namespace usbyte::sparse {
namespace {

/// Numbers of rows, and back.
class Order {
 public:
  Order(const SparseShape& shape, const SparseOptions& options, bool hashes) {
    if (hashes) hash_.emplace(options.seed, static_cast<uint64_t>(shape.rows));
  }
  void number(std::span<uint64_t> ids) const {
    if (hash_) hash_->apply(ids);
  }
  void name(std::span<uint64_t> numbers) const {
    if (hash_) hash_->invert(numbers);
  }

 private:
  std::optional<Permutation> hash_;
};

Outbox push(const SparseShape& shape, const SparseRows& rows, const Order& order,
            const Servers& servers, int ranks) {
  std::vector<uint64_t> numbers(rows.ids.begin(), rows.ids.end());
  order.number(numbers);
  std::vector<int64_t> counts(static_cast<size_t>(ranks));
  for (uint64_t number : numbers) ++counts[static_cast<size_t>(servers.of(number))];
  Outbox out(shape, counts, [&](int server) { return servers.range(server); });
  const std::byte* row = rows.values.data();
  for (uint64_t number : numbers) {
    const int server = servers.of(number);
    out.put(server, static_cast<int64_t>(number) - servers.begin(server), row);
    row += shape.row_bytes();
  }
  return out;
}

/// What this rank adds up, as the message that all pull.
Buffer serve(Exchange& exchange, const SparseShape& shape, const Outbox& pushed, int64_t range,
             bool bitmaps, SparseTraffic& traffic) {
  const Inbox arrived(exchange, pushed, traffic);
  const Sums own = add_up(shape, range, arrived.read(shape, [&](int) { return range; }));
  return write_set(shape, range, own, bitmaps);
}

}  // namespace

SparseSum push_pull(Exchange& exchange, const SparseShape& shape, SparseRows mine,
                    const SparseOptions& options, PushPull how) {
  const Servers servers(shape.rows, exchange.size());
  const Order order(shape, options, how.hashes);
  SparseSum out;
  Buffer own;
  {
    const Outbox pushed = push(shape, std::exchange(mine, {}), order, servers, exchange.size());
    out.traffic.push_imbalance = pushed.imbalance();
    own = serve(exchange, shape, pushed, servers.range(exchange.rank()), how.bitmaps, out.traffic);
  }
  const Inbox arrived(exchange, own, out.traffic);
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
    order.name(ids[s]);
    found.push_back({Keys(std::span<const uint64_t>(ids[s])), parts[s].values, {}});
  }
  out.rows = rows_of(put_together(shape, shape.rows, found));
  return out;
}

}  // namespace usbyte::sparse
