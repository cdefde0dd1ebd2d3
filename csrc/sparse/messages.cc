// SPDX-License-Identifier: Apache-2.0
#include "messages.h"

#include <algorithm>
#include <numeric>

namespace usbyte::sparse {

Outbox::Outbox(const SparseShape& shape, std::span<const int64_t> counts,
               const std::function<int64_t(int)>& range, const Allocate& allocate)
    : imbalance_(sparse::imbalance(counts)) {
  std::vector<int64_t> ranges, sizes;
  for (size_t r = 0; r < counts.size(); ++r) {
    ranges.push_back(range(static_cast<int>(r)));
    sizes.push_back(message_bytes(shape, ranges[r], counts[r]));
  }
  const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  if (!allocate) memory_ = Buffer(all);
  std::byte* message = allocate ? allocate(all) : memory_.data();
  for (size_t r = 0; r < counts.size(); ++r) {
    messages_.emplace_back(message, static_cast<size_t>(sizes[r]));
    writers_.emplace_back(message, shape, ranges[r], counts[r]);
    message += sizes[r];
  }
}

Inbox::Inbox(Exchange& exchange, const std::function<std::span<const std::byte>(int)>& message,
             SparseTraffic& traffic) {
  const int ranks = exchange.size(), rank = exchange.rank();
  std::vector<Outgoing> outgoing;
  for (int k = 1; k < ranks; ++k) {
    const int peer = (rank + k) % ranks;
    outgoing.push_back({peer, message(peer)});
    traffic.sent_bytes += std::ssize(outgoing.back().message);
  }
  memory_ = swap(exchange, outgoing);
  messages_.resize(static_cast<size_t>(ranks));
  messages_[static_cast<size_t>(rank)] = message(rank);
  for (size_t i = 0; i < memory_.size(); ++i) {
    messages_[static_cast<size_t>(outgoing[i].peer)] = memory_[i].bytes();
    traffic.received_bytes += memory_[i].size();
  }
}

Inbox::Inbox(Exchange& exchange, const Outbox& sent, SparseTraffic& traffic)
    : Inbox(exchange, [&](int rank) { return sent.message(rank); }, traffic) {}

Inbox::Inbox(Exchange& exchange, const Buffer& sent, SparseTraffic& traffic)
    : Inbox(exchange, [&](int) { return sent.bytes(); }, traffic) {}

std::vector<RowsMessage> Inbox::read(const SparseShape& shape,
                                     const std::function<int64_t(int)>& range) const {
  std::vector<RowsMessage> out;
  for (size_t r = 0; r < messages_.size(); ++r) {
    const int rank = static_cast<int>(r);
    out.push_back(sparse::read(messages_[r], shape, range(rank), rank));
  }
  return out;
}

double imbalance(std::span<const int64_t> counts) {
  const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (all == 0) return 1;
  return static_cast<double>(std::ranges::max(counts)) * static_cast<double>(counts.size()) /
         static_cast<double>(all);
}

double imbalance(std::span<const RowsMessage> messages) {
  std::vector<int64_t> counts;
  for (const RowsMessage& message : messages) counts.push_back(message.count());
  return imbalance(counts);
}

}  // namespace usbyte::sparse
