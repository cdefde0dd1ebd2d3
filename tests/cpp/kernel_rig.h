// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "cuda/kernels/launch.h"
#include "ranks.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace usbyte::test {

/// Memory of exactly so many bytes, which begins `skew`, less than 16, after a multiple of 16. The
/// address sanitizer catches what is read or written beyond its end, and before its beginning so
/// far as it can tell 8 bytes apart.
class Memory {
 public:
  Memory(int64_t bytes, int64_t skew)
      : bytes_(static_cast<size_t>(bytes)), skew_(static_cast<size_t>(skew)) {
    memory_ = std::make_unique<std::byte[]>(skew_ + bytes_);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(memory_.get(), skew_ / 8 * 8);
#endif
  }
  ~Memory() {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(memory_.get(), skew_);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() { return memory_.get() + skew_; }
  std::span<std::byte> bytes() { return {data(), bytes_}; }
  template <typename T>
  std::span<T> as() {
    return {reinterpret_cast<T*>(data()), bytes_ / sizeof(T)};
  }

 private:
  size_t bytes_, skew_;
  std::unique_ptr<std::byte[]> memory_;
};

/// Runs kernels on a grid of this shape, one thread after the other, on the host.
struct RunInShape {
  uint32_t blocks, threads;
  bool large = true;
  std::function<void()> after_thread = [] {};
  int launches = 0;

  bool large_tables() const { return large; }

  template <typename Kernel>
  void operator()(const Kernel& kernel) {
    ++launches;
    for (uint32_t block = 0; block < blocks; ++block) {
      for (uint32_t thread = 0; thread < threads; ++thread) {
        kernel({block, thread, blocks, threads});
        after_thread();
      }
    }
  }
};

inline std::vector<RunInShape> shapes() { return {{1, 1}, {1, 256}, {3, 32}, {7, 33}, {64, 256}}; }

/// Counts how often each byte of `memory` is written, in `counts`, when called after every thread:
/// `memory` must differ from what is written, which a first run has found.
class WriteCounter {
 public:
  explicit WriteCounter(std::span<std::byte> memory)
      : memory_(memory), before_(memory.begin(), memory.end()), counts_(memory.size()) {}

  void operator()() {
    if (std::memcmp(memory_.data(), before_.data(), before_.size()) == 0) return;
    for (size_t i = 0; i < before_.size(); ++i) {
      if (memory_[i] == before_[i]) continue;
      ++counts_[i];
      memory_[i] = before_[i];
    }
  }
  const std::vector<int>& counts() const { return counts_; }

 private:
  std::span<std::byte> memory_;
  std::vector<std::byte> before_;
  std::vector<int> counts_;
};

/// Mostly ordinary numbers; infinities, zeros, subnormals and what overflows in a Half among them.
inline double random_number(Random& random) {
  switch (random(0, 19)) {
    case 0:
      return std::numeric_limits<double>::infinity() * (random.one_in(2) ? 1 : -1);
    case 1:
      return random.one_in(2) ? 0.0 : -0.0;
    case 2:
      return std::ldexp(static_cast<double>(random(-1000, 1000)), -149);
    case 3:
      return static_cast<double>(random(60000, 70000));
    default:
      return std::ldexp(static_cast<double>(random(-(1 << 24), 1 << 24)),
                        static_cast<int>(random(-40, -10)));
  }
}

}  // namespace usbyte::test
