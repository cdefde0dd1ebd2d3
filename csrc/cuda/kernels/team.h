// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "grid.h"

namespace usbyte::kernels {

/// Threads of a team: a warp.
constexpr uint32_t kLanes = 32;

#ifdef __CUDA_ARCH__
/// The value that the lane has whose number differs in the bits of `mask`.
template <typename T>
__device__ T of_lane(const T& mine, uint32_t mask) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &mine, sizeof(T));
  USBYTE_UNROLL
  for (uint32_t& word : words) word = __shfl_xor_sync(0xffffffff, word, mask);
  T out;
  memcpy(&out, words, sizeof(T));
  return out;
}
#endif

/// Work that is done by teams, a piece by each, with one reduction in between. `Work` has
///   int64_t pieces() const
///   struct Lane                                             what a lane goes on with
///   Partial begin(piece, lane, Lane&) const                    its part
///   void end(piece, lane, Lane&, const Partial& whole) const
/// and Partial has join(const Partial&), which does not mind the order of the two.
///
/// Its threads exchange values; blocks are whole teams. On the host the first
/// thread of a team does what all do, and joins parts in the device's order.
template <typename Work>
struct TeamKernel {
  /// Few, as the place of a block is free again when its last team is done.
  static constexpr uint32_t kThreads = 2 * kLanes;

  Work work;

  int64_t threads_wanted() const { return work.pieces() * kLanes; }

  USBYTE_HD void operator()(GridIndex at) const {
    const uint32_t lane = at.thread % kLanes;
    for (uint64_t p = at.global() / kLanes; p < static_cast<uint64_t>(work.pieces());
         p += at.global_threads() / kLanes) {
      const auto piece = static_cast<uint32_t>(p);
#ifdef __CUDA_ARCH__
      typename Work::Lane state;
      auto whole = work.begin(piece, lane, state);
      USBYTE_UNROLL
      for (uint32_t mask = kLanes / 2; mask > 0; mask /= 2) whole.join(of_lane(whole, mask));
      work.end(piece, lane, state, whole);
#else
      if (lane == 0) do_for_all(piece);
#endif
    }
  }

 private:
  void do_for_all(uint32_t piece) const {
    typename Work::Lane states[kLanes];
    typename Work::Partial parts[kLanes], joined[kLanes];
    for (uint32_t k = 0; k < kLanes; ++k) parts[k] = work.begin(piece, k, states[k]);
    for (uint32_t mask = kLanes / 2; mask > 0; mask /= 2) {
      for (uint32_t k = 0; k < kLanes; ++k) (joined[k] = parts[k]).join(parts[k ^ mask]);
      memcpy(parts, joined, sizeof parts);
    }
    for (uint32_t k = 0; k < kLanes; ++k) work.end(piece, k, states[k], parts[k]);
  }
};

}  // namespace usbyte::kernels
