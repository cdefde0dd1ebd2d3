#include <array>
#include <bit>
#include <vector>

#include "make.h"
#include "message.h"

namespace usbyte::codecs {
namespace {

uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }

struct Threshold {
  uint32_t bits;  // of the k-th largest magnitude
  int64_t ties;   // elements of that very magnitude that are among the k
};

// By the upper bits of all magnitudes first, then among those that share the k-th one's.
Threshold threshold_of(std::span<const float> values, int64_t k) {
  constexpr int kShift = 20;
  std::array<int64_t, 1U << (31 - kShift)> counts{};
  for (float x : values) ++counts[magnitude(x) >> kShift];
  size_t bin = counts.size() - 1;
  int64_t above = 0;
  while (above + counts[bin] < k) above += counts[bin--];
  std::vector<uint32_t> candidates;
  candidates.reserve(static_cast<size_t>(counts[bin]));
  for (float x : values) {
    if (magnitude(x) >> kShift == bin) candidates.push_back(magnitude(x));
  }
  const auto place = candidates.begin() + (k - above - 1);
  std::nth_element(candidates.begin(), place, candidates.end(), std::greater<>());
  const uint32_t bits = *place;
  const auto larger = std::count_if(candidates.begin(), place, [&](auto c) { return c > bits; });
  return {bits, k - above - larger};
}

// The indices, then the values.
class TopK final : public Codec {
 public:
  explicit TopK(double ratio) : ratio_(ratio) {}

  std::string spec() const override { return "topk:" + text_of(ratio_); }
  int64_t message_bytes(int64_t count) const override { return 8 * kept(ratio_, count); }

  void encode(std::span<const float> values, const Draw&, std::byte* message) const override {
    const int64_t k = kept(ratio_, std::ssize(values));
    if (k == 0) return;
    uint32_t* const indices = at<uint32_t>(message, 0);
    float* const sent = at<float>(message, 4 * k);
    Threshold threshold = threshold_of(values, k);
    int64_t found = 0;
    in_pieces(std::ssize(values), [&](int64_t begin, int64_t count) {
      if (found == k) return;
      uint32_t candidates[1024];
      const int64_t many = loops().at_least(values.data() + begin, threshold.bits,
                                            static_cast<uint32_t>(begin), candidates, count);
      for (int64_t i = 0; i < many; ++i) {
        const float x = values[candidates[i]];
        if (magnitude(x) == threshold.bits && threshold.ties-- <= 0) continue;
        indices[found] = candidates[i];
        sent[found++] = x;
      }
    });
  }

  void decode(const std::byte* message, const Draw&, std::span<float> values) const override {
    std::fill(values.begin(), values.end(), 0.0F);
    for_each(message, std::ssize(values), [&](uint32_t i, float x) { values[i] = x; });
  }
  void decode_add(const std::byte* message, const Draw&, float factor,
                  std::span<float> values) const override {
    for_each(message, std::ssize(values), [&](uint32_t i, float x) { values[i] += factor * x; });
  }

 private:
  template <typename Body>
  void for_each(const std::byte* message, int64_t count, Body body) const {
    const int64_t k = kept(ratio_, count);
    const uint32_t* const indices = at<uint32_t>(message, 0);
    const float* const sent = at<float>(message, 4 * k);
    for (int64_t i = 0; i < k; ++i) body(indices[i], sent[i]);
  }

  const double ratio_;
};

}  // namespace

Made topk(const std::string& parameter) {
  return std::make_shared<TopK>(ratio_of("topk", parameter));
}

}  // namespace usbyte::codecs
