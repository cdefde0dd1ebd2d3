#include "coding.h"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../codec/loops.h"
#include "usbyte/error.h"
#include "usbyte/half.h"

namespace usbyte {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float widened(double x) { return static_cast<float>(x); }
template <typename T>
float widened(T x) {
  return to_float(x);
}

template <typename T>
void load(const std::byte* from, std::span<float> to) {
  const T* const values = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < to.size(); ++i) to[i] = widened(values[i]);
}

template <typename T>
void store(std::span<const float> from, std::byte* to) {
  T* const values = reinterpret_cast<T*>(to);
  for (size_t i = 0; i < from.size(); ++i) {
    if constexpr (std::is_same_v<T, double>) {
      values[i] = from[i];
    } else {
      values[i] = from_float<T>(from[i]);
    }
  }
}

void load(DType dtype, const std::byte* from, std::span<float> to) {
  if (dtype == DType::float64) load<double>(from, to);
  if (dtype == DType::float16) load<Half>(from, to);
  if (dtype == DType::bfloat16) load<BFloat16>(from, to);
}

void store(DType dtype, std::span<const float> from, std::byte* to) {
  if (dtype == DType::float64) store<double>(from, to);
  if (dtype == DType::float16) store<Half>(from, to);
  if (dtype == DType::bfloat16) store<BFloat16>(from, to);
}

// Takes what has been sent out of what is kept.
void forget(const Codec& codec, const std::byte* message, const Draw& draw, std::span<float> kept) {
  if (loops().largest(kept.data(), std::ssize(kept)) < std::bit_cast<uint32_t>(kInfinity)) {
    return codec.decode_add(message, draw, -1, kept);
  }
  // What is not finite must not come again once all ranks have seen it, nor go before.
  std::vector<float> sent(kept.size());
  codec.decode(message, draw, sent);
  for (size_t i = 0; i < kept.size(); ++i) {
    if (std::isfinite(sent[i])) {
      kept[i] -= sent[i];
    } else if (!std::isfinite(kept[i])) {
      kept[i] = 0;
    }  // else it shared a message with one that is not finite, and is still to come
  }
}

}  // namespace

Coding::Coding(const Plan& plan, std::byte* arena, float* memory, int rank, int size, uint64_t seed,
               Report encoded, Report decoded)
    : rank_(rank),
      size_(size),
      seed_(seed),
      memory_(memory),
      encoded_(std::move(encoded)),
      decoded_(std::move(decoded)),
      ops_(plan.ops().size()) {
  int64_t largest = 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& planned = plan.ops()[i];
    CodedOp& op = ops_[i];
    op.codec = make_codec(planned.codec);
    if (!op.codec) continue;
    op.dtype = plan.dtype(planned.blocks.front());
    if (op.codec->wants_feedback() && !memory) {
      throw UsageError("codec '" + planned.codec + "' needs a memory of what it has not sent");
    }
    for (Block block : planned.blocks) {
      op.blocks.push_back({block, arena + plan.byte_offset(block.begin), op.message_bytes});
      op.message_bytes += op.codec->message_bytes(block.numel());
      if (op.dtype != DType::float32) largest = std::max(largest, block.numel());
    }
    const bool adds = op.codec->adds();
    op.buffer.resize(static_cast<size_t>(op.message_bytes * (adds ? 1 : size)));
    op.request.kind = adds ? Collective::all_reduce : Collective::all_gather;
    op.request.dtype = op.codec->message_dtype();
    const int64_t elements = std::ssize(op.buffer) / itemsize(op.request.dtype);
    op.request.recv = {{op.buffer.data(), elements}};
    op.request.window_bytes = planned.window_bytes;
    op.request.fence = planned.fence;
  }
  converted_.resize(static_cast<size_t>(largest));
  thread_ = std::thread([this] { run(); });
}

void Coding::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Coding::encode(int op, int64_t step) { put({op, false, step}); }
void Coding::decode(int op, int64_t step) { put({op, true, step}); }

void Coding::put(const Job& job) {
  std::lock_guard lock(mutex_);
  jobs_.insert(job);
  work_.notify_one();
}

void Coding::run() {
  std::fesetenv(FE_DFL_ENV);  // who made the thread may flush subnormals
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const Job job = jobs_.extract(jobs_.begin()).value();
    lock.unlock();
    carry_out(job);
    lock.lock();
  }
}

void Coding::carry_out(const Job& job) {
  CodedOp& op = ops_[static_cast<size_t>(job.op)];
  std::exception_ptr error;
  try {
    job.decodes ? decode(op, job.step) : encode(op, job.step);
  } catch (...) {
    error = std::current_exception();
  }
  (job.decodes ? decoded_ : encoded_)(job.op, error);
}

std::byte* Coding::own_message(CodedOp& op) const {
  return op.buffer.data() + (op.codec->adds() ? 0 : op.message_bytes * rank_);
}

// The block itself if it is of float32, else memory for as many.
std::span<float> Coding::as_floats(const CodedOp& op, const CodedBlock& block) {
  const auto count = static_cast<size_t>(block.block.numel());
  if (op.dtype == DType::float32) return {reinterpret_cast<float*>(block.values), count};
  return {converted_.data(), count};
}

void Coding::encode(CodedOp& op, int64_t step) {
  for (const CodedBlock& b : op.blocks) {
    const Draw draw = Draw::of(seed_, step, b.block.begin, rank_);
    std::byte* const message = own_message(op) + b.message_at;
    const std::span<float> values = as_floats(op, b);
    load(op.dtype, b.values, values);
    if (!op.codec->wants_feedback()) {
      op.codec->encode(values, draw, message);
      continue;
    }
    const std::span<float> kept(memory_ + b.block.begin, values.size());
    for (size_t i = 0; i < kept.size(); ++i) kept[i] += values[i];
    op.codec->encode(kept, draw, message);
    forget(*op.codec, message, draw, kept);
  }
}

void Coding::decode(CodedOp& op, int64_t step) {
  std::vector<const std::byte*> messages(op.codec->adds() ? 1 : static_cast<size_t>(size_));
  for (const CodedBlock& b : op.blocks) {
    for (size_t r = 0; r < messages.size(); ++r) {
      messages[r] = op.buffer.data() + static_cast<int64_t>(r) * op.message_bytes + b.message_at;
    }
    const Draw draw = Draw::of(seed_, step, b.block.begin, rank_);
    const std::span<float> values = as_floats(op, b);
    op.codec->combine(messages, draw, values);
    store(op.dtype, values, b.values);
  }
}

}  // namespace usbyte
