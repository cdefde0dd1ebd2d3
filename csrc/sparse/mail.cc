#include "mail.h"

#include <algorithm>
#include <numeric>

namespace usbyte::sparse {

Outbox::Outbox(const SparseShape& shape, std::span<const int64_t> counts,
               const std::function<int64_t(int)>& range)
    : imbalance_(sparse::imbalance(counts)) {
  size_t end = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    const size_t begin = end;
    end += static_cast<size_t>(message_bytes(shape, range(static_cast<int>(r)), counts[r]));
    places_.push_back({begin, end});
  }
  memory_ = Buffer(static_cast<int64_t>(end));
  for (size_t r = 0; r < counts.size(); ++r) {
    writers_.emplace_back(memory_.data() + places_[r].begin, shape, range(static_cast<int>(r)),
                          counts[r]);
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
