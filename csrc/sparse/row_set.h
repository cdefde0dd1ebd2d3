// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace usbyte::sparse {

/// Bits that are set. std::popcount calls a library where processors need not have the instruction.
inline int64_t ones(uint64_t word) {
  word -= word >> 1 & 0x5555555555555555;
  word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
  word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f;
  return static_cast<int64_t>(word * 0x0101010101010101 >> 56);
}

/// Numbers of rows as they travel: of 4 bytes each where those suffice, else of 8.
class Keys {
 public:
  Keys() = default;
  Keys(const std::byte* data, int64_t count, bool wide) : data_(data), count_(count), wide_(wide) {}
  template <typename T>
    requires(sizeof(T) == 8)
  explicit Keys(std::span<const T> ids)
      : Keys(reinterpret_cast<const std::byte*>(ids.data()), std::ssize(ids), true) {}

  static int64_t width(int64_t range) { return range <= int64_t{1} << 32 ? 4 : 8; }

  int64_t count() const { return count_; }
  int64_t operator[](int64_t i) const {
    if (wide_) return load<int64_t>(i);
    return load<uint32_t>(i);
  }

 private:
  template <typename T>
  T load(int64_t i) const {
    T out;
    std::memcpy(&out, data_ + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return out;
  }

  const std::byte* data_ = nullptr;
  int64_t count_ = 0;
  bool wide_ = false;
};

/// The union of lists of numbers below `range`, in ascending order, and where in it each is. A
/// bitmap with a directory where that is not much larger than the lists, else sorted.
///
/// The directory is that of S. Vigna, "Broadword Implementation of Rank/Select Queries", WEA 2008:
/// one place in it and one word of the bitmap tell a position, however far apart keys are.
class RowSet {
 public:
  RowSet() = default;
  /// Throws UsageError on a number outside.
  RowSet(int64_t range, std::span<const Keys> lists);

  int64_t count() const { return count_; }
  /// Place of a number that is in the set.
  int64_t position(int64_t key) const {
    if (words_.empty()) return std::ranges::lower_bound(sorted_, key) - sorted_.begin();
    const auto word = static_cast<size_t>(key) >> 6;
    const DirectoryEntry& block = directory_[word / kBlock];
    const uint64_t within = block.within >> (kWithinBits * ((word - 1) % kBlock)) & kWithinMask;
    const uint64_t below = words_[word] & ((uint64_t{1} << (key & 63)) - 1);
    return block.before + static_cast<int64_t>(within) + ones(below);
  }
  /// Calls use(number) for each, ascending.
  template <typename Use>
  void each(Use use) const {
    for (int64_t key : sorted_) use(key);
    for (size_t w = 0; w < words_.size(); ++w) {
      for (uint64_t rest = words_[w]; rest != 0; rest &= rest - 1) {
        use(static_cast<int64_t>(w) * 64 + std::countr_zero(rest));
      }
    }
  }

 private:
  static constexpr size_t kBlock = 8;  // words for each entry of the directory
  static constexpr size_t kWithinBits = 9;
  static constexpr uint64_t kWithinMask = (uint64_t{1} << kWithinBits) - 1;

  struct DirectoryEntry {
    int64_t before;   // numbers before it
    uint64_t within;  // in it, before each word but the first; 0 comes out for that one
  };

  std::vector<uint64_t> words_;
  std::vector<DirectoryEntry> directory_;
  std::vector<int64_t> sorted_;  // instead of both
  int64_t count_ = 0;
};

}  // namespace usbyte::sparse
