#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace usbyte::sparse {

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
class RowSet {
 public:
  RowSet() = default;
  /// Throws UsageError on a number outside.
  RowSet(int64_t range, std::span<const Keys> lists);

  int64_t count() const { return count_; }
  /// Place of a number that is in the set.
  int64_t position(int64_t key) const {
    if (words_.empty()) return std::ranges::lower_bound(sorted_, key) - sorted_.begin();
    const int64_t word = key >> 6, block = word / kBlock * kBlock;
    int64_t before = directory_[static_cast<size_t>(word / kBlock)];
    for (int64_t w = block; w < word; ++w) before += std::popcount(words_[static_cast<size_t>(w)]);
    const uint64_t below = (uint64_t{1} << (key & 63)) - 1;
    return before + std::popcount(words_[static_cast<size_t>(word)] & below);
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
  static constexpr int64_t kBlock = 8;  // words for each entry of the directory

  std::vector<uint64_t> words_;
  std::vector<int64_t> directory_;  // numbers before each block
  std::vector<int64_t> sorted_;     // instead of both
  int64_t count_ = 0;
};

}  // namespace usbyte::sparse
