// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "usbyte/codec.h"

namespace usbyte::codecs {

/// Codecs that make each group of neighbouring elements smaller by itself: the groups' numbers,
/// then `bits` for each element, filled up with zeros to 4 bytes. What is not finite makes numbers
/// of its group so, and with them what elements of the group decode to.
///
/// Kernels do the same on a device: see cuda/kernels/groups.h.
class Grouped : public Codec {
 public:
  int64_t message_bytes(int64_t count) const final;
  void encode(std::span<const float> values, const RngKey& rng, std::byte* message) const final;
  void decode(const std::byte* message, const RngKey& rng, std::span<float> values) const final;
  void decode_add(const std::byte* message, const RngKey& rng, float factor,
                  std::span<float> values) const final;
  void send(std::span<const float> gradient, CodecState& state, const RngKey& rng, int ranks,
            std::byte* message) const final;
  std::optional<GroupCodec> kernels() const override { return GroupCodec{kind_}; }

 protected:
  bool finite(const float* numbers) const;
  static constexpr int64_t kMostElements = 1024;

  /// Groups of so many elements, a multiple of 32 and `kMostElements` at most.
  Grouped(GroupCodec::Kind kind, int64_t elements, int numbers, int bits)
      : kind_(kind), elements_(elements), numbers_(numbers), bits_(bits) {}

 private:
  /// Of one group, of one value at least. `key` is another for each group, step and rank. Bits of
  /// elements behind the group's, in its last 4 bytes, stay as they are: zero.
  virtual void encode_group(std::span<const float> values, uint64_t key, float* numbers,
                            uint8_t* packed) const = 0;
  virtual void decode_group(const float* numbers, const uint8_t* packed,
                            std::span<float> values) const = 0;

  /// What is encoded: the gradient is put to what is kept.
  virtual void take_up(std::span<const float> gradient, std::span<float> kept) const;
  /// What is kept of it, once the group has been encoded.
  virtual void keep_unsent(const float* numbers, const uint8_t* packed,
                           std::span<float> kept) const;

  template <typename Bytes, typename Value, typename Body>
  void each(Bytes* message, std::span<Value> values, Body body) const;
  void fill_up(int64_t count, std::byte* message) const;

  const GroupCodec::Kind kind_;
  const int64_t elements_;
  const int numbers_, bits_;
};

}  // namespace usbyte::codecs
