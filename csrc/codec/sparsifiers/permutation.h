// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace usbyte {

/// A permutation of [0, size) that a key chooses: a Feistel network of four rounds on the least
/// number of bits that hold it, walked until it comes back inside (Black and Rogaway, "Ciphers with
/// Arbitrary Finite Domains", 2002).
class Permutation {
 public:
  Permutation(uint64_t key, uint64_t size);

  uint64_t operator()(uint64_t i) const {
    do i = forward(i);
    while (i >= size_);
    return i;
  }

 private:
  // Halves are of 32 bits at most.
  uint64_t spread(uint64_t half, int round) const {
    uint64_t x = (half ^ keys_[round]) & 0xffffffff;
    x = (x * 0x9e3779b1) & 0xffffffff;
    x ^= x >> 15;
    x = (x * 0x85ebca77) & 0xffffffff;
    return x ^ x >> 13;
  }
  uint64_t forward(uint64_t i) const {
    uint64_t low = i & low_mask_, high = i >> low_bits_;
    high ^= spread(low, 0) & high_mask_;
    low ^= spread(high, 1) & low_mask_;
    high ^= spread(low, 2) & high_mask_;
    low ^= spread(high, 3) & low_mask_;
    return high << low_bits_ | low;
  }

  uint64_t keys_[4];
  uint64_t size_, low_mask_, high_mask_;
  int low_bits_;
};

}  // namespace usbyte
