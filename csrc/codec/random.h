#pragma once

#include <cstdint>

#include "usbyte/half.h"

// Random numbers by counter: the i-th of a key is the same on every machine, whoever asks for it.
namespace usbyte {

/// A bijection of 64-bit numbers that spreads every bit (the finaliser of splitmix64; Steele,
/// Lea and Flood 2014).
USBYTE_HD constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// A permutation of [0, size) that a key chooses: a Feistel network of four rounds on the least
/// even number of bits that holds it, walked until it comes back inside.
class Permutation {
 public:
  constexpr Permutation(uint64_t key, uint64_t size) : key_(key), size_(size) {
    while ((uint64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
  }

  constexpr uint64_t operator()(uint64_t i) const {
    do i = once(i);
    while (i >= size_);
    return i;
  }

 private:
  constexpr uint64_t once(uint64_t i) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = i >> half_bits_, right = i & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t next = left ^ (mix(key_ + round * 0x632be59bd9b4e019 + right) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  uint64_t key_, size_;
  uint32_t half_bits_ = 1;
};

}  // namespace usbyte
