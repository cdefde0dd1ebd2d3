// SPDX-License-Identifier: Apache-2.0
#include "coded_op.h"

#include <algorithm>
#include <map>
#include <span>

#include "buffer_floats.h"
#include "device_coding.h"
#include "message_layout.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using Floats = std::shared_ptr<BufferFloats>;

CodecState state_of(const CodingSpace& space, const Codec& codec, Block block) {
  CodecState out;
  for (int row = 0; row < codec.state_rows(); ++row) {
    out.rows[static_cast<size_t>(row)] = space.codec_state + row * space.plan.numel() + block.begin;
  }
  return out;
}

// Messages of a codec, made and read by the host.
class MessagesOp final : public CodedOp {
 public:
  MessagesOp(const CodingSpace& space, const CodedShare& part, std::shared_ptr<const Codec> codec,
             MessageLayout layout, Floats floats)
      : CodedOp(part.op, layout.kind, layout.dtype),
        codec_(std::move(codec)),
        layout_(std::move(layout)),
        floats_(std::move(floats)),
        drawer_(part.drawer),
        size_(part.size),
        seed_(space.seed + layout_.salt),
        buffer_(space.device, layout_.bytes) {
    travels(buffer_.data(), buffer_.size());
    for (const auto& run : layout_.sent) {
      states_.push_back(state_of(space, *codec_, run.block));
      reads_.push_back(run.block);
    }
    for (const auto& run : layout_.received) writes_.push_back(run.block);
    if (codec_->state_rows() > 0) keeps_ = reads_;
  }

  void encode(const CodingContext& context) override {
    for (size_t i = 0; i < layout_.sent.size(); ++i) {
      const auto [block, at] = layout_.sent[i];
      const RngKey rng = RngKey::of(seed_, context.step, block.begin, drawer_);
      codec_->send(floats_->load(block), states_[i], rng, size_, buffer_.data() + at);
    }
  }

  void decode(const CodingContext& context) override {
    std::vector<const std::byte*> messages(static_cast<size_t>(layout_.ranks));
    for (const auto& [block, at] : layout_.received) {
      const std::byte* message = buffer_.data() + at;
      for (const std::byte*& each : messages) {
        each = message;
        message += layout_.chunk;
      }
      const RngKey rng = RngKey::of(seed_, context.step, block.begin, drawer_);
      const std::span<float> values = floats_->room(block);
      codec_->combine(messages, rng, values);
      floats_->store(block, values);
    }
  }

 private:
  const std::shared_ptr<const Codec> codec_;
  const MessageLayout layout_;
  const Floats floats_;
  const int drawer_, size_;
  const uint64_t seed_;
  const HostBytes buffer_;
  std::vector<CodecState> states_;  // of each run that is sent
};

// Elements that a codec has picked, which are added up as rows of one.
class SelectedSumOp final : public CodedOp {
 public:
  SelectedSumOp(const CodingSpace& space, const Op& op, std::shared_ptr<const Codec> codec,
                Floats floats)
      : CodedOp(op, Collective::all_reduce, DType::uint8),
        codec_(std::move(codec)),
        floats_(std::move(floats)),
        rank_(space.rank),
        size_(space.size),
        seed_(space.seed) {
    travels(nullptr, 0);
    int64_t longest = 0;
    for (Block b : op.blocks) {
      states_.push_back(state_of(space, *codec_, b));
      longest = std::max(longest, codec_->message_bytes(b.numel()));
    }
    message_ = Buffer(longest);
    reads_ = writes_ = op.blocks;
    if (codec_->state_rows() > 0) keeps_ = reads_;
  }

  void encode(const CodingContext& context) override {
    ids_.clear();
    values_.clear();
    int64_t first = 0;
    for (size_t i = 0; i < reads_.size(); ++i) {
      const Block block = reads_[i];
      const RngKey rng = RngKey::of(seed_, context.step, block.begin, rank_);
      codec_->send(floats_->load(block), states_[i], rng, size_, message_.data());
      codec_->selection()->read(message_.data(), block.numel(), first, ids_, values_);
      first += block.numel();
    }
  }

  RowsView rows() const override {
    return {ids_, reinterpret_cast<const std::byte*>(values_.data())};
  }
  void sum(SparseRows rows) override { sum_ = std::move(rows); }

  void decode(const CodingContext&) override {
    const auto* const sums = reinterpret_cast<const float*>(sum_.values.data());
    size_t next = 0;
    int64_t first = 0;
    for (Block block : writes_) {
      const std::span<float> values = floats_->room(block);
      std::ranges::fill(values, 0.0F);
      for (; next < sum_.ids.size() && sum_.ids[next] < first + block.numel(); ++next) {
        values[static_cast<size_t>(sum_.ids[next] - first)] = sums[next];
      }
      floats_->store(block, values);
      first += block.numel();
    }
    sum_ = {};
  }

 private:
  const std::shared_ptr<const Codec> codec_;
  const Floats floats_;
  const int rank_, size_;
  const uint64_t seed_;
  std::vector<CodecState> states_;  // by block
  Buffer message_;                  // of one block
  std::vector<int64_t> ids_;
  std::vector<float> values_;
  SparseRows sum_;
};

// A round of a codec of two, for each of several matrices.
class RoundOp final : public CodedOp {
 public:
  using FirstSums = std::map<Block, std::span<float>>;  // by matrix

  RoundOp(const CodingSpace& space, const Op& op, std::shared_ptr<const Codec> codec, Floats floats,
          FirstSums& first)
      : CodedOp(op, Collective::all_reduce, DType::float32),
        codec_(std::move(codec)),
        floats_(std::move(floats)),
        is_first_(op.kind == Collective::reduce_scatter),
        space_(space) {
    buffer_ = HostBytes(space.device, space.plan.message_bytes(op));
    travels(buffer_.data(), buffer_.size());
    auto* next = reinterpret_cast<float*>(buffer_.data());
    for (Block b : op.blocks) {
      const TensorSpec& t = *space.plan.tensor_at(b);
      const int64_t count = codec_->matrices()->rank() * (is_first_ ? t.rows : t.cols());
      const std::span<float> sums(next, static_cast<size_t>(count));
      if (is_first_) first[b] = sums;
      matrices_.push_back({b, t.rows, t.cols(), state_of(space, *codec_, b), first.at(b), sums});
      next += count;
      (is_first_ ? reads_ : writes_).push_back(b);
      keeps_.push_back(b);
    }
  }

  void encode(const CodingContext& context) override {
    for (Matrix& m : matrices_) {
      if (is_first_) {
        const RngKey rng = RngKey::of(space_.seed, context.step, m.block.begin, space_.rank);
        codec_->matrices()->first(floats_->load(m.block), m.rows, m.state, rng, m.sums);
      } else {
        codec_->matrices()->second(m.rows, m.cols, m.state, m.first, m.sums);
      }
    }
  }

  void decode(const CodingContext&) override {
    if (is_first_) return;  // its sums are what the second round is made of
    for (Matrix& m : matrices_) {
      const std::span<float> values = floats_->room(m.block);
      codec_->matrices()->finish(m.rows, m.first, m.sums, m.state, values);
      floats_->store(m.block, values);
    }
  }

 private:
  struct Matrix {
    Block block;
    int64_t rows, cols;
    CodecState state;
    std::span<float> first, sums;  // of the first round, and of this one
  };

  const std::shared_ptr<const Codec> codec_;
  const Floats floats_;
  const bool is_first_;
  const CodingSpace space_;
  HostBytes buffer_;
  std::vector<Matrix> matrices_;
};

}  // namespace

CodedOp::CodedOp(const Op& planned, Collective kind, DType dtype) {
  request_.kind = kind;
  request_.dtype = dtype;
  request_.window_bytes = planned.window_bytes;
  request_.fence = planned.fence;
  request_.dimension = planned.dimension;
}

void CodedOp::travels(std::byte* buffer, int64_t bytes) {
  const BufferView span{buffer, bytes / itemsize(request_.dtype)};
  request_.recv = {span};
  if (request_.kind == Collective::all_to_all) request_.send = {span};
}

std::vector<std::unique_ptr<CodedOp>> make_host_coded_ops(
    const CodingSpace& space, const std::function<bool(const Op&, const Codec&)>& wanted) {
  const auto floats = std::make_shared<BufferFloats>(space.plan, space.flat_buffer);
  RoundOp::FirstSums first;
  std::vector<std::unique_ptr<CodedOp>> out;
  for (const Op& op : space.plan.ops()) {
    const auto codec = make_codec(op.codec);
    if (!codec || !wanted(op, *codec)) {
      out.push_back(nullptr);
    } else if (!op.scheme.empty()) {
      out.push_back(std::make_unique<SelectedSumOp>(space, op, codec, floats));
    } else if (codec->matrices() && op.kind != Collective::all_reduce) {
      out.push_back(std::make_unique<RoundOp>(space, op, codec, floats, first));
    } else {
      const CodedShare part(op, space.mesh, space.rank, space.size);
      out.push_back(
          std::make_unique<MessagesOp>(space, part, codec, MessageLayout(part, *codec), floats));
    }
  }
  return out;
}

std::vector<std::unique_ptr<CodedOp>> make_coded_ops(const CodingSpace& space) {
  for (const Op& op : space.plan.ops()) {
    const auto codec = make_codec(op.codec);
    if (codec && codec->state_rows() > 0 && !space.codec_state) {
      throw UsageError("codec '" + op.codec + "' needs a codec state for what it has not sent");
    }
  }
  if (space.device) return make_device_coded_ops(space);
  return make_host_coded_ops(space, [](const Op&, const Codec&) { return true; });
}

}  // namespace usbyte
