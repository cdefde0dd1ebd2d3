// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "support/half.h"

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

}  // namespace usbyte
