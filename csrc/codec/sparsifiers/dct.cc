// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "codec/make.h"
#include "codec/random.h"
#include "sparse.h"

namespace usbyte::codecs {
namespace {

// Dynamic communication thresholding: V. Gupta et al., "Training Recommender Systems at Scale:
// Communication-Efficient Model and Data Parallelism", KDD 2021 (arXiv 2010.08899). Selecting the
// largest elements costs several passes, so their threshold is kept for many steps. As messages
// have one size, what is above it and does not fit stays in the state. Ours: a threshold that far
// too many or too few are above is found anew at once.
class Dct final : public Sparse {
 public:
  Dct(double ratio, int64_t period) : Sparse(ratio), period_(period) {}

  std::string spec() const override {
    const std::string text = "dct:" + text_of(ratio());
    return period_ == kPeriod ? text : text + ",period=" + std::to_string(period_);
  }

  void send(std::span<const float> gradient, CodecState& state, const RngKey& rng, int,
            std::byte* message) const override {
    const int64_t size = std::ssize(gradient);
    Room room(message, kept(ratio(), size));
    if (size == 0) return;
    const std::span<float> unsent(state.rows[0], gradient.size());
    const Kept last = std::bit_cast<Kept>(state.note);
    Kept now{last.threshold, last.uses + 1};
    const bool stale = usable(last.threshold) && last.uses + 1 < period_;
    if (!stale) {
      loops().add(gradient.data(), 1, unsent.data(), size);
      now = {std::max(threshold_of(unsent, room.size).bits, 1U), 0};  // zeros are not worth a place
    }
    // The sum and the search are one pass. It begins anywhere, so that none is left out for long.
    const auto begin = static_cast<int64_t>(rng.shared % static_cast<uint64_t>(size));
    int64_t above = 0, left_out = -1;  // the latter: an element that is not finite
    const auto pass = [&](int64_t from, int64_t to) {
      in_pieces(to - from, [&](int64_t piece, int64_t count) {
        const int64_t first = from + piece;
        float* const values = unsent.data() + first;
        if (stale) loops().add(gradient.data() + first, 1, values, count);
        uint32_t indices[1024];
        const int64_t many = loops().at_least(values, now.threshold, 0, indices, count);
        above += many;
        for (int64_t i = 0; i < many; ++i) {
          float& value = values[indices[i]];
          if (room.found < room.size) {
            room.put(static_cast<uint32_t>(first) + indices[i], value);
            value = 0;
          } else if (!std::isfinite(value)) {
            left_out = first + indices[i];
          }
        }
      });
    };
    pass(begin, size);
    pass(0, begin);
    if (left_out >= 0 && all_finite(room.sent())) {
      // All ranks must see it in this step: in a later one it would spoil that one too.
      unsent[room.indices[room.size - 1]] = room.values[room.size - 1];
      --room.found;
      room.put(static_cast<uint32_t>(left_out), unsent[static_cast<size_t>(left_out)]);
    }
    if (!all_finite(room.sent())) forget_what_is_not_finite(unsent);
    room.close();
    const bool far = above > 4 * room.size || 4 * above < room.size;
    state.note = far ? 0 : std::bit_cast<uint64_t>(now);
  }

  static constexpr int64_t kPeriod = 1000;

 private:
  struct Kept {
    uint32_t threshold, uses;
  };
  // Zeros, and what is not finite, say nothing of what is to come.
  static bool usable(uint32_t threshold) { return threshold > 0 && threshold < kInfinityBits; }

  const int64_t period_;
};

}  // namespace

Made dct(const std::string& parameter) {
  Parameters parameters("dct", parameter);
  const double ratio = ratio_of("dct", parameters.first());
  const int64_t period = parameters.whole("period", Dct::kPeriod, 1, 1 << 30);
  parameters.check_all_read();
  return std::make_shared<Dct>(ratio, period);
}

}  // namespace usbyte::codecs
