// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "usbyte/plan.h"

namespace usbyte {

/// Blocks of a flat buffer as float32: where they lie if they are of that, else in a place of its
/// own, which the next call uses again. For one thread.
class BufferFloats {
 public:
  /// Both outlive it.
  BufferFloats(const Plan& plan, std::byte* flat_buffer) : plan_(plan), flat_buffer_(flat_buffer) {}

  /// What the block holds.
  std::span<float> load(Block block);
  /// As many, of any value.
  std::span<float> room(Block block);
  /// Puts what `room` gave, and was filled since, into the block.
  void store(Block block, std::span<const float> values);

 private:
  const Plan& plan_;
  std::byte* const flat_buffer_;
  std::vector<float> converted_;
};

}  // namespace usbyte
