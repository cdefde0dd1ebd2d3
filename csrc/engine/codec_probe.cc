#include "usbyte/codec_probe.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "device_coding.h"
#include "halt.h"
#include "usbyte/codec.h"
#include "usbyte/coded_op.h"
#include "usbyte/error.h"
#include "usbyte/event_pool.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

constexpr int64_t kSmallest = 256, kLargest = 4 << 20, kFactor = 4;  // bytes of gradients
constexpr int kSizes = 8;
constexpr int kFewestSizes = 3;  // that a cost is told from
constexpr int64_t kPool = 2 * kLargest;
constexpr int64_t kMostBlocks = 256;    // that have their turns
constexpr double kTimedS = 5e-5;        // timed together at least: the clock itself takes time
constexpr int kMostTogether = 64;       // also where a device is waited for once
constexpr int kLeast = 3, kMost = 200;  // samples of a size
constexpr int kRounds = 8;              // until memories and thresholds are as after many
constexpr int kRanks = 4;               // whose messages are combined, unless the network adds them

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

// Rows of the matrix that a block is, a power of 2.
int64_t rows_of(int64_t count) {
  return static_cast<int64_t>(
      std::bit_floor(static_cast<uint64_t>(std::sqrt(static_cast<double>(count)))));
}

// Blocks of one size, each reduced by an op, or by two if the codec has two rounds.
Plan plan_of(const Codec& codec, int64_t count) {
  std::vector<TensorSpec> tensors;
  std::vector<Op> ops;
  const int64_t most = kPool / itemsize(DType::float32) / count;
  for (int64_t i = 0; i < std::min(most, kMostBlocks); ++i) {
    const Block block{i * count, (i + 1) * count};
    tensors.push_back({std::to_string(i), count, DType::float32, block.begin, rows_of(count)});
    const auto add = [&](Collective kind) {
      ops.push_back({kind, {block}, kPool, false, codec.spec()});
    };
    if (codec.matrices()) {
      add(Collective::reduce_scatter);
      add(Collective::all_gather);
    } else {
      add(Collective::all_reduce);
    }
  }
  return Plan("probe", std::move(tensors), std::move(ops));
}

// The coded ops of rank 0 of some, as the engine uses them, on blocks of one size in turn.
class Rig {
 public:
  Rig(const Codec& codec, int64_t bytes, std::span<const float> gradients,
      const std::shared_ptr<Cuda>& cuda)
      : cuda_(cuda),
        rounds_(codec.matrices() ? 2 : 1),
        plan_(plan_of(codec, bytes / itemsize(DType::float32))),
        values_(cuda, plan_.arena_bytes()),
        zeros_(cuda, codec.memories() * plan_.numel() * itemsize(DType::float32)) {
    std::memcpy(values_.data(), gradients.data(), static_cast<size_t>(values_.size()));
    if (cuda) {
      stream_.emplace(cuda, false);
      done_ = EventPool(cuda).acquire(false);
    }
    arena_ = placed(values_);
    memory_ = placed(zeros_);
    ops_ = make_coded_ops(
        {plan_, arena_.get(), reinterpret_cast<float*>(memory_.get()), 0, kRanks, 1, cuda, &halt_});
    for (size_t turn = 0; turn < ops_.size(); turn += rounds_) {
      encode();
      finish_encoding();
      messages_ = send(last().request());
    }
    if (cuda) cuda->synchronize(stream_->get());
  }

  /// Encodes as before, for so long at most.
  void warm_up(double budget_s) {
    const double end = now_s() + budget_s;
    const size_t turns = (kRounds - 1) * ops_.size() / rounds_;
    for (size_t i = 0; i < turns && now_s() < end; ++i) encode();
    finish_encoding();
  }

  void encode() {
    next();
    first().encode(turn());
    if (&first() == &last()) return;
    first().decode(turn());  // no more than the network has added up
    last().encode(turn());
  }
  void decode() {
    next();
    last().decode(turn());
  }
  /// Until a device has done what was encoded, or decoded, last.
  void finish_encoding() {
    if (cuda_) cuda_->synchronize(last().request().order->after.front());
  }
  void finish_decoding() {
    if (cuda_) cuda_->synchronize(done_.get());
  }

  /// That are decoded together.
  int messages() const { return messages_; }
  int64_t message_bytes() const {
    const int64_t bytes = bytes_of(last().request()) / messages_;
    return &first() == &last() ? bytes : bytes + bytes_of(first().request());
  }

 private:
  static int64_t bytes_of(const Request& request) {
    return request.recv.front().count * itemsize(request.dtype);
  }

  // What the host wrote, where coded ops find it.
  std::shared_ptr<std::byte> placed(const HostBytes& host) {
    if (!cuda_) return {std::shared_ptr<void>(), host.data()};
    const auto bytes = static_cast<size_t>(host.size());
    const std::shared_ptr<std::byte> out(static_cast<std::byte*>(cuda_->allocate(bytes)),
                                         [cuda = cuda_](std::byte* p) { cuda->free(p); });
    if (bytes > 0) cuda_->copy(out.get(), host.data(), bytes, stream_->get());
    cuda_->synchronize(stream_->get());
    return out;
  }

  // As if the other ranks had sent the same; how many messages there are now.
  int send(const Request& request) {
    if (request.kind != Collective::all_gather) return 1;
    auto* const own = static_cast<std::byte*>(request.recv.front().data);
    const int64_t bytes = bytes_of(request) / kRanks;
    for (int64_t rank = 1; rank < kRanks; ++rank) {
      std::byte* const to = own + rank * bytes;
      if (cuda_) {
        cuda_->copy(to, own, static_cast<size_t>(bytes), stream_->get());
      } else {
        std::memcpy(to, own, static_cast<size_t>(bytes));
      }
    }
    return kRanks;
  }

  void next() {
    at_ = (at_ + rounds_) % ops_.size();
    if (at_ == 0) ++step_;
  }
  CodedOp& first() const { return *ops_[at_]; }
  CodedOp& last() const { return *ops_[at_ + rounds_ - 1]; }
  // Whatever the network does has been done before.
  Turn turn() const {
    if (!cuda_) return {step_};
    return {step_, StreamOrder{{}, {}, done_.get()}, done_.get()};
  }

  const std::shared_ptr<Cuda> cuda_;
  const size_t rounds_;
  const Plan plan_;
  const HostBytes values_, zeros_;
  std::optional<OwnedStream> stream_;
  PooledEvent done_;
  std::shared_ptr<std::byte> arena_, memory_;
  Halt halt_;
  std::vector<std::unique_ptr<CodedOp>> ops_;
  size_t at_ = 0;
  int64_t step_ = 0;
  int messages_ = 1;
};

// Seconds of `action`, until `finish` has ended, each time; for about `budget_s`.
std::vector<double> sample(const std::function<void()>& action, const std::function<void()>& finish,
                           double budget_s) {
  const auto timed = [&](int together) {
    const double start = now_s();
    for (int i = 0; i < together; ++i) action();
    finish();
    return std::max(now_s() - start, 1e-9) / together;
  };
  timed(1);  // touches memory for the first time
  const double once_s = timed(1);
  const int together = static_cast<int>(std::clamp(kTimedS / once_s, 1.0, 1.0 * kMostTogether));
  std::vector<double> out;
  const double end = now_s() + budget_s;
  for (int i = 0; i < kMost && (i < kLeast || now_s() < end); ++i) out.push_back(timed(together));
  return out;
}

// Whether blocks of so many bytes are coded at all: small matrices may not be worth it.
bool codes(const Codec& codec, int64_t bytes) {
  const int64_t count = bytes / itemsize(DType::float32), rows = rows_of(count);
  return !codec.matrices() || codec.matrices()->pays(rows, count / rows);
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

MeasuredCodec measure_codec(std::string_view spec, double budget_s,
                            const std::shared_ptr<Cuda>& device) {
  const auto codec = make_codec(spec);
  if (!codec) throw UsageError("measure_codec: \"none\" codes nothing; name a codec");
  if (!(budget_s > 0)) throw UsageError("measure_codec: the budget must be positive seconds");
  MeasuredCodec out{codec->spec(), {}, 0, 0, 0, 0, {}, {}};
  out.cost.at_once = device != nullptr;
  const std::vector<float> values = gradients();
  int64_t bytes = kSmallest;
  int sizes = kSizes;
  for (; !codes(*codec, bytes); --sizes) bytes *= kFactor;  // any rank pays for the largest
  double left_s = budget_s;
  for (int size = 0; size < sizes && (size < kFewestSizes || left_s > 0); ++size) {
    Rig rig(*codec, bytes, values, device);
    const double share_s = std::max(left_s, 0.0) / (3 * (sizes - size));
    const double start_s = now_s();
    rig.warm_up(share_s);
    for (double s : sample([&] { rig.encode(); }, [&] { rig.finish_encoding(); }, share_s)) {
      out.encode.push_back({bytes, s});
    }
    const int messages = rig.messages();
    for (double s : sample([&] { rig.decode(); }, [&] { rig.finish_decoding(); }, share_s)) {
      out.decode.push_back(device ? Sample{messages * bytes, s} : Sample{bytes, s / messages});
    }
    left_s -= now_s() - start_s;
    out.largest_bytes = bytes;
    out.message_bytes = rig.message_bytes();
    bytes *= kFactor;
  }
  const Fit encode = fit_codec_cost(out.encode), decode = fit_codec_cost(out.decode);
  out.cost.encode = encode.cost;
  out.cost.decode = decode.cost;
  out.encode_residual = encode.residual;
  out.decode_residual = decode.residual;
  return out;
}

}  // namespace usbyte
