// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "codec/make.h"
#include "codec/random.h"
#include "sparse.h"

namespace usbyte::codecs {
namespace {

// Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
// Training", ICLR 2018: what is remembered is the velocity's sum (momentum correction), which, with
// the velocity, is forgotten where it has been sent (momentum factor masking); gradients are
// clipped before, by block; the threshold is that of a sample, and if more than the share are above
// it, the largest of them are sent. The optimizer itself is to have no momentum.
class Dgc final : public Sparse {
 public:
  Dgc(double ratio, double momentum, double clip, int64_t warmup)
      : Sparse(ratio), momentum_(momentum), clip_(clip), warmup_(warmup) {}

  std::string spec() const override {
    return text(ratio()) + (warmup_ > 0 ? ",warmup=" + std::to_string(warmup_) : "");
  }
  std::string at_step(int64_t step) const override {
    if (step >= warmup_) return text(ratio());
    return text(
        std::max(ratio(), std::ldexp(1.0, static_cast<int>(-2 * (4 * step / warmup_ + 1)))));
  }
  int state_rows() const override { return 2; }
  std::string remembers() const override { return "unsent, velocity"; }
  bool relays() const override { return false; }

  void send(std::span<const float> gradient, CodecState& state, const RngKey& rng, int ranks,
            std::byte* message) const override {
    const int64_t size = std::ssize(gradient);
    Room room(message, kept(ratio(), size));
    if (size == 0) return;
    const float scale = clipped(gradient, ranks);
    const auto momentum = static_cast<float>(momentum_);
    float* const unsent = state.rows[0];
    float* const velocity = state.rows[1];
    for (int64_t i = 0; i < size; ++i) {
      velocity[i] = momentum * velocity[i] + scale * gradient[static_cast<size_t>(i)];
      unsent[i] += velocity[i];
    }
    choose({unsent, gradient.size()}, rng, room);
    for (int64_t i = 0; i < room.found; ++i) {
      velocity[room.indices[i]] = unsent[room.indices[i]] = 0;
    }
    if (!all_finite(room.sent())) {
      forget_what_is_not_finite({unsent, gradient.size()});
      forget_what_is_not_finite({velocity, gradient.size()});
    }
    room.close();
  }

  static constexpr double kMomentum = 0.9;

 private:
  std::string text(double ratio) const {
    std::string out = "dgc:" + text_of(ratio);
    if (momentum_ != kMomentum) out += ",momentum=" + text_of(momentum_);
    if (clip_ > 0) out += ",clip=" + text_of(clip_);
    return out;
  }

  float clipped(std::span<const float> gradient, int ranks) const {
    if (!(clip_ > 0)) return 1;
    const double norm = std::sqrt(loops().sum_of_squares(gradient.data(), std::ssize(gradient)));
    const double most = clip_ / std::sqrt(static_cast<double>(ranks));
    return std::isfinite(norm) && norm > most ? static_cast<float>(most / norm) : 1.0F;
  }

  void choose(std::span<const float> values, const RngKey& rng, Room& room) const {
    const int64_t size = std::ssize(values);
    // Enough for 64 of them to be above the threshold, whose place has an error of an eighth then.
    const auto enough = static_cast<int64_t>(std::ceil(64 / ratio()));
    const int64_t samples = std::min(size, std::max(size / 100, enough));
    uint32_t least = 0;
    if (samples < size) {
      std::vector<float> sample(static_cast<size_t>(samples));
      const int64_t stride = size / samples;
      const auto begin = static_cast<int64_t>(rng.own % static_cast<uint64_t>(stride));
      for (int64_t i = 0; i < samples; ++i) {
        sample[static_cast<size_t>(i)] = values[static_cast<size_t>(begin + i * stride)];
      }
      least = threshold_of(sample, kept(ratio(), samples)).bits;
    }
    std::vector<uint32_t> indices;
    std::vector<float> candidates;
    each_at_least(values, least, [&](uint32_t i, float x) {
      indices.push_back(i);
      candidates.push_back(x);
    });
    Threshold threshold{least, 0};
    const bool too_many = std::ssize(candidates) > room.size;
    if (too_many) threshold = threshold_of(candidates, room.size);
    for (size_t i = 0; i < candidates.size(); ++i) {
      const uint32_t bits = magnitude_bits(candidates[i]);
      if (too_many && bits < threshold.bits) continue;
      if (too_many && bits == threshold.bits && threshold.ties-- <= 0) continue;
      room.put(indices[i], candidates[i]);
    }
  }

  const double momentum_, clip_;
  const int64_t warmup_;  // steps
};

}  // namespace

Made dgc(const std::string& parameter) {
  Parameters parameters("dgc", parameter);
  const double ratio = ratio_of("dgc", parameters.first());
  const double momentum = parameters.number("momentum", Dgc::kMomentum, 0, 0.999999);
  const double clip = parameters.number("clip", 0, 0, 1e30);
  const int64_t warmup = parameters.whole("warmup", 0, 0, int64_t{1} << 40);
  parameters.check_all_read();
  return std::make_shared<Dgc>(ratio, momentum, clip, warmup);
}

}  // namespace usbyte::codecs
