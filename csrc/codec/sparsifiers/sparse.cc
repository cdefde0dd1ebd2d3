// SPDX-License-Identifier: Apache-2.0
#include "sparse.h"

#include <array>

#include "usbyte/error.h"

namespace usbyte::codecs {

// By the upper bits of all magnitudes first, then among those that share the k-th one's.
Threshold threshold_of(std::span<const float> values, int64_t k) {
  constexpr int kShift = 20;
  std::array<int64_t, 1U << (31 - kShift)> counts{};
  for (float x : values) ++counts[magnitude_bits(x) >> kShift];
  size_t bin = counts.size() - 1;
  int64_t above = 0;
  while (above + counts[bin] < k) above += counts[bin--];
  std::vector<uint32_t> candidates;
  candidates.reserve(static_cast<size_t>(counts[bin]));
  for (float x : values) {
    if (magnitude_bits(x) >> kShift == bin) candidates.push_back(magnitude_bits(x));
  }
  const auto place = candidates.begin() + (k - above - 1);
  std::nth_element(candidates.begin(), place, candidates.end(), std::greater<>());
  const uint32_t bits = *place;
  const auto larger = std::count_if(candidates.begin(), place, [&](auto c) { return c > bits; });
  return {bits, k - above - larger};
}

int64_t Sparse::message_bytes(int64_t count) const {
  if (count >= int64_t{kNone}) {
    throw UsageError("codec '" + spec() + "': a block of " + std::to_string(count) +
                     " elements has no 32-bit indices; plan smaller ones");
  }
  return 8 * kept(ratio_, count);
}

void Sparse::encode(std::span<const float> values, const RngKey&, std::byte* message) const {
  Room room(message, kept(ratio_, std::ssize(values)));
  if (room.size == 0) return;
  Threshold threshold = threshold_of(values, room.size);
  each_at_least(values, threshold.bits, [&](uint32_t i, float x) {
    if (magnitude_bits(x) > threshold.bits || threshold.ties-- > 0) room.put(i, x);
  });
}

uint32_t Sparse::checked(uint32_t index, int64_t count) const {
  if (index < count) return index;
  throw FaultError("a message by " + spec() + " has index " + std::to_string(index) + " for " +
                   std::to_string(count) + " elements: the received message is damaged");
}

void Sparse::decode(const std::byte* message, const RngKey&, std::span<float> values) const {
  std::fill(values.begin(), values.end(), 0.0F);
  const int64_t k = kept(ratio_, std::ssize(values));
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t index = at<uint32_t>(message, 0)[i];
    if (index != kNone) values[checked(index, std::ssize(values))] = at<float>(message, 4 * k)[i];
  }
}

void Sparse::decode_add(const std::byte* message, const RngKey&, float factor,
                        std::span<float> values) const {
  const int64_t k = kept(ratio_, std::ssize(values));
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t index = at<uint32_t>(message, 0)[i];
    if (index == kNone) continue;
    values[checked(index, std::ssize(values))] += factor * at<float>(message, 4 * k)[i];
  }
}

void Sparse::read(const std::byte* message, int64_t count, int64_t first, std::vector<int64_t>& ids,
                  std::vector<float>& values) const {
  const int64_t k = selected_count(count);
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t index = at<uint32_t>(message, 0)[i];
    const float value = at<float>(message, 4 * k)[i];
    if (index == kNone || value == 0) continue;
    ids.push_back(first + checked(index, count));
    values.push_back(value);
  }
}

}  // namespace usbyte::codecs
