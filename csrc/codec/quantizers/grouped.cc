// SPDX-License-Identifier: Apache-2.0
#include "grouped.h"

#include <algorithm>
#include <cmath>

#include "codec/message.h"

namespace usbyte::codecs {

// Calls body(group's values, numbers, bytes, first element) for each group of a message.
template <typename Bytes, typename Value, typename Body>
void Grouped::each(Bytes* message, std::span<Value> values, Body body) const {
  const int64_t size = std::ssize(values), groups = (size + elements_ - 1) / elements_;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * elements_, count = std::min(elements_, size - begin);
    body(values.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)),
         at<float>(message, 4 * numbers_ * g),
         at<uint8_t>(message, 4 * numbers_ * groups + begin * bits_ / 8), begin);
  }
}

int64_t Grouped::message_bytes(int64_t count) const {
  const int64_t groups = (count + elements_ - 1) / elements_;
  return 4 * numbers_ * groups + round_up((count * bits_ + 7) / 8, 4);
}

void Grouped::fill_up(int64_t count, std::byte* message) const {
  const int64_t odd = count % (32 / bits_);  // elements of the last 4 bytes, if those are not full
  if (odd > 0) std::fill_n(message + message_bytes(count) - 4, 4, std::byte{0});
}

void Grouped::encode(std::span<const float> values, const RngKey& rng, std::byte* message) const {
  fill_up(std::ssize(values), message);
  each(message, values, [&](auto in, float* numbers, uint8_t* packed, int64_t begin) {
    encode_group(in, rng.own + static_cast<uint64_t>(begin), numbers, packed);
  });
}

void Grouped::decode(const std::byte* message, const RngKey&, std::span<float> values) const {
  each(message, values, [&](auto out, const float* numbers, const uint8_t* packed, int64_t) {
    decode_group(numbers, packed, out);
  });
}

void Grouped::decode_add(const std::byte* message, const RngKey&, float factor,
                         std::span<float> values) const {
  each(message, values, [&](auto out, const float* numbers, const uint8_t* packed, int64_t) {
    float decoded[kMostElements];
    decode_group(numbers, packed, {decoded, out.size()});
    loops().add(decoded, factor, out.data(), std::ssize(out));
  });
}

// Group by group, so that what is remembered goes through the cache once.
void Grouped::send(std::span<const float> gradient, CodecState& state, const RngKey& rng, int,
                   std::byte* message) const {
  if (state_rows() == 0) return encode(gradient, rng, message);
  fill_up(std::ssize(gradient), message);
  each(message, gradient, [&](auto in, float* numbers, uint8_t* packed, int64_t begin) {
    const std::span<float> kept(state.rows[0] + begin, in.size());
    take_up(in, kept);
    encode_group(kept, rng.own + static_cast<uint64_t>(begin), numbers, packed);
    keep_unsent(numbers, packed, kept);
  });
}

bool Grouped::finite(const float* numbers) const {
  return std::all_of(numbers, numbers + numbers_, [](float x) { return std::isfinite(x); });
}

void Grouped::take_up(std::span<const float> gradient, std::span<float> kept) const {
  loops().add(gradient.data(), 1, kept.data(), std::ssize(kept));
}

void Grouped::keep_unsent(const float* numbers, const uint8_t* packed,
                          std::span<float> kept) const {
  float sent[kMostElements];
  decode_group(numbers, packed, {sent, kept.size()});
  if (finite(numbers)) return loops().add(sent, -1, kept.data(), std::ssize(kept));
  forget({sent, kept.size()}, kept);
}

}  // namespace usbyte::codecs
