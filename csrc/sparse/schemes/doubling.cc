// SPDX-License-Identifier: Apache-2.0
#include "doubling.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace usbyte::sparse {
namespace {

class Doubling {
 public:
  Doubling(Exchange& exchange, const SparseShape& shape, Sums sums,
           const std::function<void(Sums&)>& grown)
      : exchange_(exchange), shape_(shape), grown_(grown), sums_(std::move(sums)) {}

  SparseSum run() {
    const int size = exchange_.size(), rank = exchange_.rank();
    const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));
    if (rank >= core) {
      give(rank - core);
      sums_ = add_up(shape_, shape_.rows, {});
      add(rank - core, false);
    } else {
      if (rank + core < size) add(rank + core, false);
      for (int distance = 1; distance < core; distance *= 2) add(rank ^ distance, true);
      if (rank + core < size) give(rank + core);
    }
    return {rows_of(std::move(sums_)), traffic_};
  }

 private:
  void give(int peer) { trade(peer, true); }

  /// Adds the peer's rows, those of the lower rank first, so that both have the same sums.
  void add(int peer, bool both) {
    Buffer own;
    const Buffer theirs = trade(peer, both, &own);
    RowsMessage messages[] = {read(own.bytes(), shape_, shape_.rows, exchange_.rank()),
                              read(theirs.bytes(), shape_, shape_.rows, peer)};
    if (peer < exchange_.rank()) std::swap(messages[0], messages[1]);
    sums_ = add_up(shape_, shape_.rows, messages);
  }

  /// What the peer sends; it gets this rank's sums, or an empty message.
  Buffer trade(int peer, bool sends, Buffer* own = nullptr) {
    if (sends && grown_) grown_(sums_);
    Buffer message = write_set(shape_, shape_.rows, sums_, false);
    const Outgoing outgoing{peer, sends ? message.bytes() : std::span<const std::byte>()};
    std::vector<Buffer> got = swap(exchange_, std::span(&outgoing, 1));
    traffic_.sent_bytes += std::ssize(outgoing.message);
    traffic_.received_bytes += got[0].size();
    if (own) *own = std::move(message);
    return std::move(got[0]);
  }

  Exchange& exchange_;
  const SparseShape& shape_;
  const std::function<void(Sums&)>& grown_;
  Sums sums_;
  SparseTraffic traffic_;
};

}  // namespace

SparseSum recursive_doubling(Exchange& exchange, const SparseShape& shape, SparseRows mine,
                             const std::function<void(Sums&)>& grown) {
  return Doubling(exchange, shape, sums_of(shape, std::move(mine)), grown).run();
}

double doubling_bytes(int ranks, const SparseDensity& density,
                      const std::function<double(double)>& bytes) {
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks)));
  const int beyond = ranks - core;  // the first ranks stand for two, and send them the result
  double out = beyond > 0 ? bytes(density.of(ranks)) : 0;
  for (int group = 1; group < core; group *= 2) {
    out += bytes(density.of(group + std::min(group, beyond)));
  }
  return out;
}

int doubling_transfers(int ranks) {
  const auto n = static_cast<unsigned>(ranks);
  const int rounds = std::bit_width(n) - 1;
  return 2 * (std::has_single_bit(n) ? rounds : rounds + 2);
}

}  // namespace usbyte::sparse
