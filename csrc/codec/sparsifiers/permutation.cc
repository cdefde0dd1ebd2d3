// SPDX-License-Identifier: Apache-2.0
#include "permutation.h"

#include <algorithm>
#include <bit>

#include "codec/random.h"

namespace usbyte {

Permutation::Permutation(uint64_t key, uint64_t size) : size_(size) {
  const int bits = std::max(2, static_cast<int>(std::bit_width(size > 0 ? size - 1 : 0)));
  low_bits_ = bits / 2;
  low_mask_ = (uint64_t{1} << low_bits_) - 1;
  high_mask_ = (uint64_t{1} << (bits - low_bits_)) - 1;
  for (uint64_t round = 0; round < 4; ++round) keys_[round] = mix(key + round);
}

}  // namespace usbyte
