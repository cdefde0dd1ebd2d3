#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "loops.h"

// What codecs share in how they lay out and read their messages.
namespace usbyte::codecs {

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Smaller magnitudes have no reciprocal to scale with: they count as 0.
constexpr float kLeastScaled = 0x1p-100F;
constexpr uint32_t kInfinityBits = 0x7f800000;

/// How many of `count` elements a share of them is, one at least.
inline int64_t kept(double ratio, int64_t count) {
  if (count == 0) return 0;
  return std::max<int64_t>(std::llround(ratio * static_cast<double>(count)), 1);
}

template <typename T>
T* at(std::byte* message, int64_t bytes) {
  return reinterpret_cast<T*>(message + bytes);
}

template <typename T>
const T* at(const std::byte* message, int64_t bytes) {
  return reinterpret_cast<const T*>(message + bytes);
}

/// Calls body(begin, count) for pieces of [0, count) that stay in the first-level cache.
template <int64_t Piece = 1024, typename Body>
void in_pieces(int64_t count, Body body) {
  for (int64_t begin = 0; begin < count; begin += Piece) {
    body(begin, std::min(Piece, count - begin));
  }
}

/// values += factor * what `decode(begin, count, out)` gives for each piece of them.
template <typename Decode>
void add_decoded(std::span<float> values, float factor, Decode decode) {
  in_pieces(std::ssize(values), [&](int64_t begin, int64_t count) {
    float decoded[1024];
    decode(begin, count, decoded);
    loops().add(decoded, factor, values.data() + begin, count);
  });
}

/// Signed numbers of 2, 4 or 8 bits, the first in the lowest bits.
inline void pack(const int8_t* in, int bits, uint8_t* out, int64_t count) {
  const int each = 8 / bits, mask = (1 << bits) - 1;
  for (int64_t i = 0; i < count; i += each) {
    int byte = 0;
    for (int k = 0; k < each && i + k < count; ++k) byte |= (in[i + k] & mask) << (k * bits);
    out[i / each] = static_cast<uint8_t>(byte);
  }
}

inline void unpack(const uint8_t* in, int bits, int8_t* out, int64_t count) {
  const int each = 8 / bits, spare = 8 - bits;
  for (int64_t i = 0; i < count; ++i) {
    const int shifted = in[i / each] >> (i % each * bits) << spare;
    out[i] = static_cast<int8_t>(static_cast<int8_t>(shifted) >> spare);
  }
}

}  // namespace usbyte::codecs
