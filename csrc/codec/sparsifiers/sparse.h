// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <functional>
#include <vector>

#include "codec/message.h"
#include "usbyte/codec.h"

namespace usbyte::codecs {

inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }

/// What the k-th largest magnitude is, in bits, which are in the order of magnitudes.
struct Threshold {
  uint32_t bits;
  int64_t ties;  ///< elements of that very magnitude that are among the k
};

/// `k` is at least 1 and at most the number of values.
Threshold threshold_of(std::span<const float> values, int64_t k);

/// Codecs that send a share of the elements: their indices, then their values. Indices of
/// kNone, which no element has, stand for nothing.
class Sparse : public Codec, public Selection {
 public:
  explicit Sparse(double ratio) : ratio_(ratio) {}

  int64_t message_bytes(int64_t count) const override;
  /// The largest in magnitude, the first among equals.
  void encode(std::span<const float> values, const RngKey& rng, std::byte* message) const override;
  void decode(const std::byte* message, const RngKey& rng, std::span<float> values) const override;
  void decode_add(const std::byte* message, const RngKey& rng, float factor,
                  std::span<float> values) const override;

  const Selection* selection() const override { return this; }
  int64_t selected_count(int64_t count) const override { return kept(ratio_, count); }
  void read(const std::byte* message, int64_t count, int64_t first, std::vector<int64_t>& ids,
            std::vector<float>& values) const override;

 protected:
  static constexpr uint32_t kNone = 0xffffffff;

  /// A message that is being written, with place for `size` elements.
  struct Room {
    Room(std::byte* message, int64_t k)
        : indices(at<uint32_t>(message, 0)), values(at<float>(message, 4 * k)), size(k) {}
    void put(uint32_t index, float value) {
      indices[found] = index;
      values[found++] = value;
    }
    std::span<const float> sent() const { return {values, static_cast<size_t>(found)}; }
    /// What there is no element for.
    void close() {
      std::fill(indices + found, indices + size, kNone);
      std::fill(values + found, values + size, 0.0F);
    }

    uint32_t* indices;
    float* values;
    int64_t size, found = 0;
  };

  double ratio() const { return ratio_; }

 private:
  /// Throws FaultError if there is no such element: a message has been damaged.
  uint32_t checked(uint32_t index, int64_t count) const;

  const double ratio_;
};

/// Calls put(index, value) for what has at least `least` as its magnitude's bits, by index.
template <typename Put>
void each_at_least(std::span<const float> values, uint32_t least, Put put) {
  in_pieces(std::ssize(values), [&](int64_t begin, int64_t count) {
    uint32_t indices[1024];
    const int64_t many = loops().at_least(values.data() + begin, least,
                                          static_cast<uint32_t>(begin), indices, count);
    for (int64_t i = 0; i < many; ++i) put(indices[i], values[indices[i]]);
  });
}

}  // namespace usbyte::codecs
