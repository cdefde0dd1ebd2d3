#include "usbyte/codec_probe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>

#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

constexpr int64_t kSmallest = 256, kLargest = 4 << 20, kFactor = 4;  // bytes of gradients
constexpr int kSizes = 8;
constexpr int kFewestSizes = 3;  // that a cost is told from
constexpr int64_t kPool = 2 * kLargest;
constexpr int64_t kTimed = 16 << 10;    // bytes timed together: the clock itself takes time
constexpr int kLeast = 3, kMost = 200;  // samples of a size
constexpr int kMessages = 4;            // combined, where they are not added by the network

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

std::vector<float> gradients() {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<float> out(kLargest / sizeof(float));
  for (float& x : out) x = normal(rng);
  out.insert(out.end(), out.begin(), out.end());
  return out;
}

// Gradients as the engine's arena, its memory beside it, and messages; blocks of one size in turn.
class Rig {
 public:
  explicit Rig(const Codec& codec)
      : codec_(codec), messages_of_(codec.adds() ? 1 : kMessages), values_(gradients()) {
    for (int row = 0; row < codec.memories(); ++row) {
      rows_[static_cast<size_t>(row)].resize(values_.size());
    }
  }

  /// Whether so many bytes of gradients are coded at all: small matrices may not be worth it.
  bool codes(int64_t bytes) const {
    const Matrices* const m = codec_.matrices();
    return !m || m->pays(edge_of(bytes), bytes / 4 / edge_of(bytes));
  }

  void start(int64_t bytes) {
    count_ = bytes / static_cast<int64_t>(sizeof(float));
    at_ = 0;
    notes_.clear();
    edge_ = edge_of(bytes);
    if (const Matrices* m = codec_.matrices()) {
      first_.resize(static_cast<size_t>(m->rank() * edge_));
      second_.resize(static_cast<size_t>(m->rank() * (count_ / edge_)));
    }
    messages_.resize(static_cast<size_t>(messages_of_));
    pointers_.clear();
    for (auto& message : messages_) {
      message.resize(static_cast<size_t>(codec_.message_bytes(count_)));
      pointers_.push_back(message.data());
    }
    for (int i = 0; i < messages_of_; ++i) encode();
  }

  void encode() {
    const std::span<float> values = next();
    std::byte* const message = messages_[static_cast<size_t>(turn_++ % messages_of_)].data();
    const Draw draw = Draw::of(1, turn_, at_, 0);
    Memory memory = remembered();
    if (const Matrices* m = codec_.matrices()) {
      m->first(values, edge_, memory, draw, first_);
      m->second(edge_, count_ / edge_, memory, first_, second_);
    } else {
      codec_.send(values, memory, draw, kMessages, message);
      notes_[at_] = memory.note;
    }
  }

  void decode() {
    const std::span<float> values = next();
    if (const Matrices* m = codec_.matrices()) {
      Memory memory = remembered();
      m->finish(edge_, first_, second_, memory, values);
    } else {
      codec_.combine(pointers_, Draw::of(1, turn_, at_, 0), values);
    }
  }

  /// Bytes of a message of the size that was started.
  int64_t message_bytes() const {
    const Matrices* const m = codec_.matrices();
    return m ? 4 * m->rank() * (edge_ + count_ / edge_) : codec_.message_bytes(count_);
  }

  int messages() const { return messages_of_; }

 private:
  // Rows of the matrix that a block is, a power of 2.
  static int64_t edge_of(int64_t bytes) {
    return static_cast<int64_t>(
        std::bit_floor(static_cast<uint64_t>(std::sqrt(static_cast<double>(bytes / 4)))));
  }

  // Of the block that `next` gave.
  Memory remembered() {
    Memory out;
    for (size_t row = 0; row < static_cast<size_t>(codec_.memories()); ++row) {
      out.rows[row] = rows_[row].data() + at_;
    }
    out.note = notes_[at_];
    return out;
  }

  std::span<float> next() {
    at_ = at_ + 2 * count_ > std::ssize(values_) ? 0 : at_ + count_;
    return {values_.data() + at_, static_cast<size_t>(count_)};
  }

  const Codec& codec_;
  const int messages_of_;
  std::vector<float> values_, first_, second_;
  std::array<std::vector<float>, 2> rows_;
  std::map<int64_t, uint64_t> notes_;  // by where a block begins
  int64_t edge_ = 1;
  int64_t count_ = 0, at_ = 0, turn_ = 0;
  std::vector<std::vector<std::byte>> messages_;
  std::vector<const std::byte*> pointers_;
};

// Samples of about `budget_s` together.
void sample(const std::function<void()>& action, int64_t bytes, double parts, double budget_s,
            std::vector<Sample>& out) {
  const auto together = static_cast<int>(std::max<int64_t>(kTimed / bytes, 1));
  action();  // touches memory for the first time
  const double end = now_s() + budget_s;
  for (int i = 0; i < kMost && (i < kLeast || now_s() < end); ++i) {
    const double start = now_s();
    for (int k = 0; k < together; ++k) action();
    out.push_back({bytes, std::max(now_s() - start, 1e-9) / (together * parts)});
  }
}

}  // namespace

Fit fit_codec_cost(std::span<const Sample> samples) {
  if (samples.empty()) throw UsageError("fit_codec_cost: no samples");
  std::map<int64_t, std::vector<double>> by_size;
  for (const Sample& s : samples) {
    if (s.bytes <= 0 || !(s.seconds > 0 && std::isfinite(s.seconds))) {
      throw UsageError("fit_codec_cost: a sample of no bytes or no time");
    }
    by_size[s.bytes].push_back(s.seconds);
  }
  std::vector<Sample> points;
  for (const auto& [bytes, seconds] : by_size) points.push_back({bytes, median(seconds)});

  // The error is linear between lines on which the cost goes through a point or bends at its size;
  // it is least where two of them cross.
  std::vector<std::pair<double, double>> crossings;
  for (const Sample& p : points) {
    const double beta = p.seconds / static_cast<double>(p.bytes);
    crossings.emplace_back(0, beta);
    for (const Sample& q : points) {
      const double bytes = static_cast<double>(q.bytes);
      crossings.emplace_back(q.seconds, beta);
      crossings.emplace_back(beta * bytes, beta);
      crossings.emplace_back(p.seconds, p.seconds / bytes);
    }
  }
  Fit best{};
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [alpha, beta] : crossings) {
    const AlphaBeta cost{alpha, beta, alpha};
    std::vector<double> errors;
    double sum = 0;
    for (const Sample& p : points) {
      errors.push_back(std::abs(cost.time_s(p.bytes) - p.seconds) / p.seconds);
      sum += errors.back();
    }
    if (sum >= least) continue;
    least = sum;
    best = {cost, median(std::move(errors))};
  }
  return best;
}

MeasuredCodec measure_codec(std::string_view spec, double budget_s) {
  const auto codec = make_codec(spec);
  if (!codec) throw UsageError("measure_codec: \"none\" codes nothing; name a codec");
  if (!(budget_s > 0)) throw UsageError("measure_codec: the budget must be positive seconds");
  MeasuredCodec out{codec->spec(), {}, 0, 0, 0, 0, {}, {}};
  Rig rig(*codec);
  const double end = now_s() + budget_s;
  int64_t bytes = kSmallest;
  int sizes = kSizes;
  for (; !rig.codes(bytes); --sizes) bytes *= kFactor;  // any rank pays for the largest
  for (int size = 0; size < sizes && (size < kFewestSizes || now_s() < end); ++size) {
    const double share_s = std::max(end - now_s(), 0.0) / (2 * (sizes - size));
    rig.start(bytes);
    sample([&] { rig.encode(); }, bytes, 1, share_s, out.encode);
    sample([&] { rig.decode(); }, bytes, rig.messages(), share_s, out.decode);
    out.largest_bytes = bytes;
    bytes *= kFactor;
  }
  out.message_bytes = rig.message_bytes();
  const Fit encode = fit_codec_cost(out.encode), decode = fit_codec_cost(out.decode);
  out.cost = {encode.cost, decode.cost};
  out.encode_residual = encode.residual;
  out.decode_residual = decode.residual;
  return out;
}

}  // namespace usbyte
