// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/simd/loops.h"

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

/// Takes what has been sent out of what is kept. What is not finite must not come again once all
/// ranks have seen it, nor go before.
inline void forget(std::span<const float> sent, std::span<float> kept) {
  for (size_t i = 0; i < kept.size(); ++i) {
    if (std::isfinite(sent[i])) {
      kept[i] -= sent[i];
    } else if (!std::isfinite(kept[i])) {
      kept[i] = 0;
    }  // else it shared a message with one that is not finite, and is still to come
  }
}

/// Once some of it has been sent all ranks know, and the rest would only spoil more steps.
inline void forget_what_is_not_finite(std::span<float> kept) {
  for (float& x : kept) {
    if (!std::isfinite(x)) x = 0;
  }
}

inline bool all_finite(std::span<const float> values) {
  return std::ranges::all_of(values, [](float x) { return std::isfinite(x); });
}

/// Signed numbers of `Bits`, the first in the lowest bits.
template <int Bits>
void pack(const int8_t* in, uint8_t* out, int64_t count) {
  constexpr int kEach = 8 / Bits, kMask = (1 << Bits) - 1;
  const int64_t whole = count / kEach;
  for (int64_t j = 0; j < whole; ++j) {
    int byte = 0;
    for (int k = 0; k < kEach; ++k) byte |= (in[j * kEach + k] & kMask) << (k * Bits);
    out[j] = static_cast<uint8_t>(byte);
  }
  int byte = 0;
  for (int64_t i = whole * kEach; i < count; ++i) byte |= (in[i] & kMask) << (i % kEach * Bits);
  if (whole * kEach < count) out[whole] = static_cast<uint8_t>(byte);
}

template <int Bits>
void unpack(const uint8_t* in, int8_t* out, int64_t count) {
  constexpr int kEach = 8 / Bits, kSpare = 8 - Bits;
  const auto number = [](uint8_t byte, int k) {
    return static_cast<int8_t>(static_cast<int8_t>(byte >> (k * Bits) << kSpare) >> kSpare);
  };
  const int64_t whole = count / kEach;
  for (int64_t j = 0; j < whole; ++j) {
    for (int k = 0; k < kEach; ++k) out[j * kEach + k] = number(in[j], k);
  }
  for (int64_t i = whole * kEach; i < count; ++i) {
    out[i] = number(in[whole], static_cast<int>(i % kEach));
  }
}

/// The same for a width of 2, 4 or 8 that is known when the program runs.
inline void pack(const int8_t* in, int bits, uint8_t* out, int64_t count) {
  bits == 2   ? pack<2>(in, out, count)
  : bits == 4 ? pack<4>(in, out, count)
              : pack<8>(in, out, count);
}

inline void unpack(const uint8_t* in, int bits, int8_t* out, int64_t count) {
  bits == 2   ? unpack<2>(in, out, count)
  : bits == 4 ? unpack<4>(in, out, count)
              : unpack<8>(in, out, count);
}

}  // namespace usbyte::codecs
