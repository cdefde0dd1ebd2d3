// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "codec/message.h"
#include "codec/random.h"
#include "grouped.h"

namespace usbyte::codecs {

/// Codecs that round each element, by chance and without bias, to one of a few equal levels of a
/// number of its group.
class Levels : public Grouped {
 public:
  int state_rows() const final { return 0; }

 protected:
  /// Levels of that width: 1 and -1 times the number are the outermost.
  Levels(GroupCodec::Kind kind, int64_t elements, int bits)
      : Grouped(kind, elements, 1, bits), bits_(bits), levels_((1 << (bits - 1)) - 1) {}

 private:
  /// Not below any magnitude; not finite if a value is not.
  virtual float most_of(std::span<const float> values) const = 0;

  void encode_group(std::span<const float> values, uint64_t key, float* number,
                    uint8_t* packed) const override {
    const int64_t count = std::ssize(values);
    float most = most_of(values);
    if (!std::isfinite(most)) most = std::numeric_limits<float>::quiet_NaN();
    if (most < kLeastScaled) most = 0;
    *number = most;
    int8_t levels[kMostElements] = {};
    if (most > 0) {
      loops().to_levels(values.data(), static_cast<float>(levels_) / most, levels_,
                        static_cast<uint32_t>(mix(key)), levels, count);
    }
    pack(levels, bits_, packed, count);
  }
  void decode_group(const float* number, const uint8_t* packed,
                    std::span<float> values) const override {
    int8_t levels[kMostElements];
    unpack(packed, bits_, levels, std::ssize(values));
    loops().from_int8(levels, *number / static_cast<float>(levels_), values.data(),
                      std::ssize(values));
  }

  const int bits_, levels_;
};

}  // namespace usbyte::codecs
