// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "grid.h"

// Reading and writing N neighbouring elements of an array by 16 bytes at a time, wherever the array
// begins and ends.
namespace usbyte::kernels {

constexpr uint32_t kPieceBytes = 16;

/// Bytes, 8 or 16, that one instruction moves; it faults where the address is no multiple of them.
template <uint32_t Bytes>
struct __attribute__((may_alias, aligned(Bytes))) Words {
  uint32_t word[Bytes / 4];
};

// Addresses come to these as pointers derived from the array's own: of a pointer made from a number
// nvcc would not know that it is one to global memory.

template <uint32_t Bytes>
USBYTE_HD inline void load_aligned(uint32_t* words, const void* address) {
  const Words<Bytes> loaded = *static_cast<const Words<Bytes>*>(address);
  memcpy(words, &loaded, Bytes);
}

template <typename T, uint32_t N>
USBYTE_HD void store_aligned(T* address, const T (&values)[N]) {
  constexpr uint32_t kBytes = N * sizeof(T);
  // Of words that come from 8-byte elements nvcc would make three stores.
  struct __attribute__((may_alias, aligned(kBytes))) Elements {
    T of[N];
  };
  using Stored = std::conditional_t<sizeof(T) == 8, Elements, Words<kBytes>>;
  Stored stored;
  memcpy(&stored, values, kBytes);
  *reinterpret_cast<Stored*>(address) = stored;
}

/// The 32 bits that lie `bits`, less than 32, above the start of high:low.
USBYTE_HD inline uint32_t funnel_shift(uint32_t low, uint32_t high, uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> bits);
#endif
}

/// N elements of an array that has been asked for. `fetch` only issues the loads, so that a thread
/// can have many in flight; `get` waits for them.
///
/// What does not lie on a boundary is cut out of the aligned pieces that hold it: one load more,
/// which the neighbouring thread issues too and the first-level cache answers.
template <typename T, uint32_t N>
class Fetched {
 public:
  /// Elements [begin, begin + N) of the array of `count` elements at `source`; those that the array
  /// does not have become zero. No byte outside the array is read.
  USBYTE_HD void fetch(const T* source, int32_t begin, uint32_t count) {
    const intptr_t bytes = static_cast<intptr_t>(begin) * intptr_t{sizeof(T)};
    offset_ = static_cast<uint32_t>((reinterpret_cast<uintptr_t>(source) + bytes) % kLoad);
    const intptr_t from = bytes - offset_;
    const intptr_t to = from + kBytes + (offset_ ? kLoad : 0);
    if (from >= 0 && to <= static_cast<intptr_t>(count * sizeof(T))) {
      const auto* const pieces = reinterpret_cast<const char*>(source) + from;
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kLoads; ++i) {
        load_aligned<kLoad>(words_ + i * kLoad / 4, pieces + i * kLoad);
      }
      if (offset_) load_aligned<kLoad>(words_ + kBytes / 4, pieces + kBytes);
    } else {
      offset_ = 0;
      T values[N];
      USBYTE_UNROLL
      for (uint32_t i = 0; i < N; ++i) {
        const int32_t at = begin + static_cast<int32_t>(i);
        values[i] = at >= 0 && static_cast<uint32_t>(at) < count ? source[at] : T{};
      }
      memcpy(words_, values, kBytes);
    }
  }

  USBYTE_HD void get(T (&values)[N]) {
    if (offset_) {
      // A shift by a number of bytes that is known only now, in steps that are known already:
      // indices that are not would put the words into memory.
      if constexpr (kLoad == 16) drop_words<2>(offset_ & 8);
      drop_words<1>(offset_ & 4);
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kBytes / 4; ++i) {
        words_[i] = funnel_shift(words_[i], words_[i + 1], offset_ % 4 * 8);
      }
    }
    memcpy(values, words_, kBytes);
  }

 private:
  static constexpr uint32_t kBytes = N * sizeof(T);
  static constexpr uint32_t kLoad = kBytes < kPieceBytes ? kBytes : kPieceBytes;
  static constexpr uint32_t kLoads = kBytes / kLoad;
  static_assert(kLoad == 8 || kLoad == 16);

  template <uint32_t Words>
  USBYTE_HD void drop_words(uint32_t wanted) {
    USBYTE_UNROLL
    for (uint32_t i = 0; i < kBytes / 4 + kLoad / 4 - Words; ++i) {
      words_[i] = wanted ? words_[i + Words] : words_[i];
    }
  }

  uint32_t words_[kBytes / 4 + kLoad / 4];
  uint32_t offset_ = 0;
};

/// Writes elements [begin, begin + N), which are 8 or 16 bytes, of the array of `count` elements at
/// `target`, so far as the array has them. No other byte is written.
template <typename T, uint32_t N>
USBYTE_HD void put(T* target, int32_t begin, uint32_t count, const T (&values)[N]) {
  static_assert(N * sizeof(T) == 8 || N * sizeof(T) == kPieceBytes);
  const uintptr_t skew = reinterpret_cast<uintptr_t>(target) / sizeof(T) + begin;
  if (begin >= 0 && static_cast<uint32_t>(begin) + N <= count && skew % N == 0) {
    store_aligned(target + begin, values);
    return;
  }
  USBYTE_UNROLL
  for (uint32_t i = 0; i < N; ++i) {
    const int32_t at = begin + static_cast<int32_t>(i);
    if (at >= 0 && static_cast<uint32_t>(at) < count) target[at] = values[i];
  }
}

/// Bytes of N elements, 8 or some pieces, that are moved at once.
template <typename T, uint32_t N>
constexpr uint32_t kAtOnce = N * sizeof(T) < kPieceBytes ? N * sizeof(T) : kPieceBytes;

template <uint32_t N, typename T>
USBYTE_HD bool is_aligned(const T* array) {
  return reinterpret_cast<uintptr_t>(array) % kAtOnce<T, N> == 0;
}

/// Elements [begin, begin + N) of the array of `count` elements at `source`; those that the array
/// does not have become zero. `Plain` elements are all there, at a multiple of N in an array that
/// is aligned; the others are loaded one by one.
template <bool Plain, typename T, uint32_t N>
USBYTE_HD void read(const T* source, uint32_t begin, uint32_t count, T (&values)[N]) {
  if constexpr (Plain) {
    constexpr uint32_t kBytes = kAtOnce<T, N>;
    const auto* const from = reinterpret_cast<const char*>(source + begin);
    uint32_t words[N * sizeof(T) / 4];
    USBYTE_UNROLL
    for (uint32_t b = 0; b < sizeof words; b += kBytes) {
      load_aligned<kBytes>(words + b / 4, from + b);
    }
    memcpy(values, words, sizeof words);
  } else {
    USBYTE_UNROLL
    for (uint32_t i = 0; i < N; ++i) values[i] = begin + i < count ? source[begin + i] : T{};
  }
}

/// Writes what `read` reads, so far as the array has it.
template <bool Plain, typename T, uint32_t N>
USBYTE_HD void write(T* target, uint32_t begin, uint32_t count, const T (&values)[N]) {
  if constexpr (Plain) {
    constexpr uint32_t kEach = kAtOnce<T, N> / sizeof(T);
    USBYTE_UNROLL
    for (uint32_t i = 0; i < N; i += kEach) {
      T each[kEach];
      memcpy(each, values + i, sizeof each);
      store_aligned(target + begin + i, each);
    }
  } else {
    USBYTE_UNROLL
    for (uint32_t i = 0; i < N; ++i) {
      if (begin + i < count) target[begin + i] = values[i];
    }
  }
}

}  // namespace usbyte::kernels
