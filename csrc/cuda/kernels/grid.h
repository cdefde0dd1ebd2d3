// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "support/half.h"

#ifdef __CUDA_ARCH__
#define USBYTE_UNROLL _Pragma("unroll")
#else
#define USBYTE_UNROLL
#endif

// A kernel is a trivially copyable struct of its parameters with
//   USBYTE_HD void operator()(GridIndex at) const   what one thread does
//   int64_t threads_wanted() const                  how many find work
// It uses neither shared memory nor synchronisation, and is right for every shape of the grid.
// So the host can run it thread after thread, and what a thread does is all there is to test.
// Exceptions: in team.h a warp's threads exchange values, and blocks are whole warps; in
// partition.h threads meet in atomics.
namespace usbyte::kernels {

/// Where a thread is in its grid.
struct GridIndex {
  uint32_t block, thread, blocks, threads;

  USBYTE_HD uint64_t global() const { return uint64_t{block} * threads + thread; }
  USBYTE_HD uint64_t global_threads() const { return uint64_t{blocks} * threads; }
};

/// Threads of a block; of a kernel that has a `kThreads`, so many.
template <typename Kernel>
constexpr uint32_t kThreadsPerBlock = 256;
template <typename Kernel>
  requires(Kernel::kThreads > 0)
constexpr uint32_t kThreadsPerBlock<Kernel> = Kernel::kThreads;

/// Threads beyond this many take turns. Eight waves of what an H100 holds at a time.
constexpr int64_t kMostThreads = 8192 * 256;

template <typename Kernel>
uint32_t blocks_for(const Kernel& kernel) {
  const int64_t wanted = kernel.threads_wanted();
  const int64_t threads = wanted < kMostThreads ? wanted : kMostThreads;
  constexpr int64_t kThreads = kThreadsPerBlock<Kernel>;
  return static_cast<uint32_t>((threads + kThreads - 1) / kThreads);
}

}  // namespace usbyte::kernels
