// SPDX-License-Identifier: Apache-2.0
#include "usbyte/exchange.h"

#include <sys/mman.h>

namespace usbyte {
namespace {

// What is smaller glibc keeps for the next, with its pages.
constexpr int64_t kLarge = int64_t{32} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

Buffer::Buffer(int64_t bytes) : size_(bytes) {
  const std::align_val_t alignment{static_cast<size_t>(bytes < kLarge ? 16 : kHugePage)};
  void* const memory = ::operator new(static_cast<size_t>(bytes), alignment);
  data_ = {static_cast<std::byte*>(memory), Delete(alignment)};
  if (bytes >= kLarge) {
    // A wish: without it the memory is as good.
    ::madvise(memory, static_cast<size_t>(bytes / kHugePage * kHugePage), MADV_HUGEPAGE);
  }
}

}  // namespace usbyte
