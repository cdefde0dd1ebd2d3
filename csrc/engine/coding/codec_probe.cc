// SPDX-License-Identifier: Apache-2.0
#include "codec_probe.h"

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

#include "coded_op.h"
#include "cuda/event_pool.h"
#include "device_coding.h"
#include "engine/cancellation_token.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

constexpr int64_t kSmallest = 256, kFactor = 4;  // bytes of gradients
constexpr int kFewestSizes = 3;                  // that a cost is told from
constexpr int64_t kTile = 8 << 20;               // of gradients, again and again
constexpr double kTimedS = 1e-4;  // timed together at least: the clock itself takes time
constexpr int kMostTogether = 64;
constexpr int kLeast = 3, kMost = 200;  // samples of a size
constexpr int kRanks = 4;               // whose messages are combined, unless the network adds them
constexpr int kRounds = 8;              // until states and thresholds are as after many

// Bytes of the largest block; of all that have their turns, of which there are `blocks` at most;
// and whether small ones are spread over as many.
struct Sizes {
  int64_t largest, pool, blocks;
  bool spread;
};
constexpr Sizes kOnHost{4 << 20, 8 << 20, 256, true};
// Launches take long beside what kernels do, and caches are larger.
constexpr Sizes kByKernels{64 << 20, 128 << 20, 16, false};
constexpr Sizes kThroughHost{4 << 20, 8 << 20, 16, false};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

std::vector<float> gradients() {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<float> out(kTile / sizeof(float) / 2);
  for (float& x : out) x = normal(rng);
  out.insert(out.end(), out.begin(), out.end());
  return out;
}

// Rows of the matrix that a block is, a power of 2.
int64_t rows_of(int64_t count) {
  return static_cast<int64_t>(
      std::bit_floor(static_cast<uint64_t>(std::sqrt(static_cast<double>(count)))));
}

// Whether blocks of so many bytes are coded at all: small matrices may not be worth it.
bool codes(const Codec& codec, int64_t bytes) {
  const int64_t count = bytes / itemsize(DType::float32), rows = rows_of(count);
  return !codec.matrices() || codec.matrices()->pays(rows, count / rows);
}

// Blocks of one size, each reduced by an op, or by two if the codec has two rounds; in between is
// what no codec is for.
Plan plan_of(const Codec& codec, int64_t bytes, const Sizes& sizes) {
  const int64_t blocks = std::min(sizes.pool / bytes, sizes.blocks);
  const int64_t count = bytes / itemsize(DType::float32);
  const int64_t stride = sizes.spread ? sizes.pool / blocks / itemsize(DType::float32) : count;
  std::vector<TensorSpec> tensors;
  std::vector<Op> ops;
  const auto add = [&](int64_t begin, int64_t end, const std::string& spec) {
    const std::string name = std::to_string(tensors.size());
    tensors.push_back({name, end - begin, DType::float32, begin, rows_of(count)});
    const bool rounds = codec.matrices() && spec != "none";
    ops.push_back({rounds ? Collective::reduce_scatter : Collective::all_reduce,
                   {{begin, end}},
                   sizes.pool,
                   false,
                   spec});
    if (!rounds) return;
    ops.push_back(ops.back());
    ops.back().kind = Collective::all_gather;
  };
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = i * stride;
    add(begin, begin + count, codec.spec());
    if (count < stride) add(begin + count, begin + stride, "none");
  }
  return Plan("probe", std::move(tensors), std::move(ops));
}

// A stream whose work is over before this goes, for the memory that it works on.
class DrainedStream {
 public:
  explicit DrainedStream(const std::shared_ptr<Cuda>& cuda) : cuda_(cuda), stream_(cuda, false) {}
  ~DrainedStream() {
    try {
      cuda_->synchronize(stream_.get());
    } catch (const FaultError&) {
      // Then nothing runs on the device any more.
    }
  }

  CudaStream get() const { return stream_.get(); }

 private:
  const std::shared_ptr<Cuda> cuda_;
  const OwnedStream stream_;
};

// The coded ops of a rank, as the engine uses them, on blocks of one size in turn.
class Rig {
 public:
  Rig(const Codec& codec, int64_t bytes, const Sizes& sizes, int ranks,
      std::span<const float> gradients, const std::shared_ptr<Cuda>& cuda)
      : cuda_(cuda), rounds_(codec.matrices() ? 2 : 1), plan_(plan_of(codec, bytes, sizes)) {
    if (cuda_) {
      stream_.emplace(cuda_);
      EventPool events(cuda_);
      begin_ = events.acquire(EventKind::timed);
      end_ = events.acquire(EventKind::timed);
      done_ = events.acquire(EventKind::ordering);
    }
    flat_buffer_ = room(plan_.flat_buffer_bytes());
    for (int64_t at = 0; at < plan_.flat_buffer_bytes(); at += kTile) {
      copy(flat_buffer_.get() + at, gradients.data(),
           std::min(plan_.flat_buffer_bytes() - at, kTile));
    }
    if (const int64_t kept = codec.state_rows() * plan_.numel(); kept > 0) {
      codec_state_ = room(kept * itemsize(DType::float32));
      if (cuda_) cuda_->fill(codec_state_.get(), DType::float32, kept, 0, stream_->get());
    }
    ops_ = make_coded_ops({plan_, flat_buffer_.get(), reinterpret_cast<float*>(codec_state_.get()),
                           0, ranks, 1, cuda_, &cancellation_});
    std::erase(ops_, nullptr);
    if (last().request().kind == Collective::all_gather) messages_ = ranks;
  }
  ~Rig() { ops_.front()->quiesce(); }  // before any of them goes

  /// To be called first. Encodes so that there are messages; and then on, as long as states
  /// change what that takes and there is time.
  void warm_up(double budget_s) {
    receive();
    const double end = now_s() + budget_s;
    const auto turns = (kRounds - messages_) * static_cast<int>(ops_.size() / rounds_);
    for (int i = 0; i < turns && now_s() < end; ++i) encode();
    finish_encoding();
  }

  /// Seconds of one encoding, or decoding, of so many; of a device, on its clock, which does not
  /// count how long the host takes to learn of it.
  double encode_s(int times) {
    return timed(times, [&] { encode(); }, [&] { finish_encoding(); });
  }
  double decode_s(int times) {
    return timed(times, [&] { decode(); }, [&] { finish_decoding(); });
  }

  /// That are decoded together.
  int messages() const { return messages_; }
  int64_t message_bytes() const {
    const int64_t bytes = bytes_of(last().request()) / messages_;
    return rounds_ == 1 ? bytes : bytes + bytes_of(first().request());
  }

 private:
  static int64_t bytes_of(const Request& request) {
    return request.recv.front().count * itemsize(request.dtype);
  }

  // Zeros on the host, anything on a device.
  std::shared_ptr<std::byte> room(int64_t bytes) const {
    const auto count = static_cast<size_t>(bytes);
    if (!cuda_) return {new std::byte[count](), std::default_delete<std::byte[]>()};
    return {static_cast<std::byte*>(cuda_->allocate(count)),
            [cuda = cuda_](std::byte* p) { cuda->free(p); }};
  }
  void copy(std::byte* to, const void* from, int64_t bytes) const {
    if (cuda_) {
      cuda_->copy(to, from, static_cast<size_t>(bytes), stream_->get());
    } else {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    }
  }

  // Encodes every block as often as messages are decoded, each for another rank.
  void receive() {
    for (int64_t rank = messages_ - 1; rank >= 0; --rank) {
      if (cuda_) cuda_->record(begin_.get(), stream_->get());  // behind copies of messages
      for (size_t i = 0; i < ops_.size(); i += rounds_) {
        encode();
        if (rank == 0) continue;
        const Request& request = last().request();
        auto* const own = static_cast<std::byte*>(request.recv.front().data);
        const int64_t bytes = bytes_of(request) / messages_;
        if (cuda_) cuda_->wait(stream_->get(), encoded(last()));
        copy(own + rank * bytes, own, bytes);
      }
    }
    finish_encoding();
  }

  void encode() {
    next();
    first().encode(context());
    if (rounds_ == 1) return;
    // No more than the network has added up.
    first().decode(cuda_ ? context(encoded(first())) : context());
    last().encode(context());
  }
  void decode() {
    next();
    last().decode(context());
  }
  static CudaEvent encoded(const CodedOp& op) { return op.request().order->after.front(); }

  // Ends a device's time where what was encoded, or decoded, last is there.
  void finish_encoding() const {
    if (cuda_) finish(encoded(last()));
  }
  void finish_decoding() const {
    if (cuda_) finish(done_.get());
  }
  void finish(CudaEvent event) const {
    cuda_->wait(stream_->get(), event);
    cuda_->record(end_.get(), stream_->get());
    cuda_->synchronize(end_.get());
  }
  double timed(int times, const std::function<void()>& action,
               const std::function<void()>& ended) const {
    const double start = now_s();
    if (cuda_) cuda_->record(begin_.get(), stream_->get());
    for (int i = 0; i < times; ++i) action();
    ended();
    const double s = cuda_ ? cuda_->elapsed_s(begin_.get(), end_.get()) : now_s() - start;
    return std::max(s, 1e-9) / times;
  }

  void next() {
    at_ = (at_ + rounds_) % ops_.size();
    if (at_ == 0) ++step_;
  }
  CodedOp& first() const { return *ops_[at_]; }
  CodedOp& last() const { return *ops_[at_ + rounds_ - 1]; }
  CodingContext context() const { return cuda_ ? context(begin_.get()) : CodingContext{step_}; }
  // Behind an event, whatever is done: the network takes no time.
  CodingContext context(CudaEvent behind) const {
    return {step_, StreamOrder{{behind}, {}, behind}, done_.get()};
  }

  const std::shared_ptr<Cuda> cuda_;
  const size_t rounds_;
  const Plan plan_;
  PooledEvent begin_, end_;  // of a device's time, on `stream_`
  PooledEvent done_;         // decoding
  std::shared_ptr<std::byte> flat_buffer_, codec_state_;
  std::optional<DrainedStream> stream_;
  CancellationToken cancellation_;
  std::vector<std::unique_ptr<CodedOp>> ops_;
  size_t at_ = 0;
  int64_t step_ = 0;
  int messages_ = 1;
};

// As many samples as `budget_s` allows.
std::vector<double> sample(const std::function<double(int)>& timed_s, double budget_s) {
  timed_s(1);  // touches memory for the first time
  const double once_s = timed_s(1);
  const int together = static_cast<int>(std::clamp(kTimedS / once_s, 1.0, 1.0 * kMostTogether));
  std::vector<double> out;
  const double end = now_s() + budget_s;
  for (int i = 0; i < kMost && (i < kLeast || now_s() < end); ++i) out.push_back(timed_s(together));
  return out;
}

// What every message but the first adds to decoding those of one block, by the largest measured.
double further_s_per_byte(const Codec& codec, const MeasuredCodec& measured, const Sizes& sizes,
                          std::span<const float> gradients, const std::shared_ptr<Cuda>& device) {
  std::vector<double> first_s;
  for (const Sample& s : measured.decode) {
    if (s.bytes == measured.largest_bytes) first_s.push_back(s.seconds);
  }
  try {
    Rig rig(codec, measured.largest_bytes, sizes, kRanks, gradients, device);
    rig.warm_up(0);
    const double all_s = median(sample([&](int n) { return rig.decode_s(n); }, 0));
    const double further_s = std::max(all_s - median(std::move(first_s)), 0.0) / (kRanks - 1);
    return further_s / static_cast<double>(measured.largest_bytes);
  } catch (const FaultError&) {
    return measured.cost.decode.beta_s_per_byte;  // there is no room for messages
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

MeasuredCodec measure_codec(std::string_view spec, double budget_s,
                            const std::shared_ptr<Cuda>& device) {
  const auto codec = make_codec(spec);
  if (!codec) throw UsageError("measure_codec: \"none\" codes nothing; name a codec");
  if (!(budget_s > 0)) throw UsageError("measure_codec: the budget must be positive seconds");
  MeasuredCodec out{codec->spec(), {}, 0, 0, 0, 0, {}, {}};
  out.cost.at_once = device != nullptr;
  const Sizes& sizes = !device ? kOnHost : codec->kernels() ? kByKernels : kThroughHost;
  const int ranks = device ? 1 : kRanks;
  const std::vector<float> values = gradients();
  std::vector<int64_t> to_measure;
  for (int64_t bytes = kSmallest; bytes <= sizes.largest; bytes *= kFactor) {
    if (codes(*codec, bytes)) to_measure.push_back(bytes);  // any rank pays for the largest
  }
  double left_s = budget_s;
  for (int left = static_cast<int>(to_measure.size()), done = 0; left > 0; --left, ++done) {
    if (done >= kFewestSizes && left_s <= 0) break;
    const int64_t bytes = to_measure[static_cast<size_t>(done)];
    std::optional<Rig> rig;
    try {
      rig.emplace(*codec, bytes, sizes, ranks, values, device);
    } catch (const FaultError&) {
      if (!device || done < kFewestSizes) throw;
      break;  // there is no room; a device that is broken will say so again
    }
    const double share_s = std::max(left_s, 0.0) / (3 * left), start_s = now_s();
    rig->warm_up(share_s);
    for (double s : sample([&](int n) { return rig->encode_s(n); }, share_s)) {
      out.encode.push_back({bytes, s});
    }
    for (double s : sample([&](int n) { return rig->decode_s(n); }, share_s)) {
      out.decode.push_back({bytes, s / rig->messages()});
    }
    left_s -= now_s() - start_s;
    out.largest_bytes = bytes;
    out.message_bytes = rig->message_bytes();
  }
  const Fit encode = fit_codec_cost(out.encode), decode = fit_codec_cost(out.decode);
  out.cost.encode = encode.cost;
  out.cost.decode = decode.cost;
  if (device && !codec->adds() && !codec->matrices()) {
    out.cost.further_s_per_byte = further_s_per_byte(*codec, out, sizes, values, device);
  }
  out.encode_residual = encode.residual;
  out.decode_residual = decode.residual;
  return out;
}

}  // namespace usbyte
