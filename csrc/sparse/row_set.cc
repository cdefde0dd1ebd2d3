// SPDX-License-Identifier: Apache-2.0
#include "row_set.h"

#include <string>

#include "usbyte/error.h"

namespace usbyte::sparse {
namespace {

constexpr int64_t kSparsest = 512;  // numbers of the range for each one listed, for a bitmap

void check(int64_t key, int64_t range) {
  if (key >= 0 && key < range) return;
  throw UsageError("row " + std::to_string(key) + " is outside a matrix of " +
                   std::to_string(range) + " rows");
}

}  // namespace

RowSet::RowSet(int64_t range, std::span<const Keys> lists) {
  int64_t listed = 0;
  for (const Keys& keys : lists) listed += keys.count();
  if (range / kSparsest > listed) {
    sorted_.reserve(static_cast<size_t>(listed));
    for (const Keys& keys : lists) {
      for (int64_t i = 0; i < keys.count(); ++i) {
        check(keys[i], range);
        sorted_.push_back(keys[i]);
      }
    }
    std::ranges::sort(sorted_);
    sorted_.erase(std::ranges::unique(sorted_).begin(), sorted_.end());
    count_ = std::ssize(sorted_);
    return;
  }
  words_.resize(static_cast<size_t>((range + 63) / 64));
  for (const Keys& keys : lists) {
    for (int64_t i = 0; i < keys.count(); ++i) {
      const int64_t key = keys[i];
      check(key, range);
      words_[static_cast<size_t>(key >> 6)] |= uint64_t{1} << (key & 63);
    }
  }
  directory_.reserve((words_.size() + kBlock - 1) / kBlock);
  for (size_t first = 0; first < words_.size(); first += kBlock) {
    DirectoryEntry block{count_, 0};
    const size_t end = std::min(first + kBlock, words_.size());
    for (size_t w = first; w < end; ++w) {
      const auto within = static_cast<uint64_t>(count_ - block.before);
      if (w > first) block.within |= within << (kWithinBits * (w - first - 1));
      count_ += ones(words_[w]);
    }
    directory_.push_back(block);
  }
}

}  // namespace usbyte::sparse
