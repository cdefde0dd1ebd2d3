#include "usbyte/coded_op.h"

#include <map>
#include <span>

#include "arena_floats.h"
#include "device_coding.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using Floats = std::shared_ptr<ArenaFloats>;

Memory memory_of(const CodingSpace& space, const Codec& codec, Block block) {
  Memory out;
  for (int row = 0; row < codec.memories(); ++row) {
    out.rows[static_cast<size_t>(row)] = space.memory + row * space.plan.numel() + block.begin;
  }
  return out;
}

// One message, or one for each rank, of each block.
class MessagesOp final : public CodedOp {
 public:
  MessagesOp(const CodingSpace& space, const Op& op, std::shared_ptr<const Codec> codec,
             Floats floats)
      : CodedOp(op, travels_by(op.kind, *codec), dtype_of(op.kind, *codec)),
        codec_(std::move(codec)),
        floats_(std::move(floats)),
        rank_(space.rank),
        size_(space.size),
        // A rank's shard is coded when it is scattered and when it is gathered, by other chances.
        seed_(space.seed + (op.kind == Collective::all_gather ? 1 : 0)) {
    const bool in_parts = op.kind != Collective::all_reduce;
    int64_t chunk = 0;  // bytes for, or of, each rank
    std::vector<int64_t> places;
    for (Block b : op.blocks) {
      places.push_back(chunk);
      chunk += codec_->message_bytes((in_parts ? shard(b, 0, size_) : b).numel());
    }
    const bool added = !in_parts && codec_->adds();
    buffer_ = HostBytes(space.device, added ? chunk : size_ * chunk);
    travels(buffer_.data(), buffer_.size());
    std::byte* const buffer = buffer_.data();
    for (size_t i = 0; i < op.blocks.size(); ++i) {
      const Block b = op.blocks[i];
      const auto place = [&](int rank) { return buffer + rank * chunk + places[i]; };
      const auto every_place = [&] {
        std::vector<const std::byte*> out;
        for (int r = 0; r < size_; ++r) out.push_back(place(r));
        return out;
      };
      const Block own = shard(b, rank_, size_);
      switch (op.kind) {
        case Collective::reduce_scatter:
          for (int r = 0; r < size_; ++r) sends(space, shard(b, r, size_), place(r));
          receives_.push_back({own, every_place()});
          break;
        case Collective::all_gather:
          sends(space, own, place(rank_));
          for (int r = 0; r < size_; ++r) receives_.push_back({shard(b, r, size_), {place(r)}});
          break;
        default:
          sends(space, b, place(added ? 0 : rank_));
          receives_.push_back({b, added ? std::vector<const std::byte*>{place(0)} : every_place()});
      }
    }
    for (const Sent& s : sends_) reads_.push_back(s.block);
    for (const Received& r : receives_) writes_.push_back(r.block);
  }

  void encode(const Turn& turn) override {
    for (Sent& s : sends_) {
      const Draw draw = Draw::of(seed_, turn.step, s.block.begin, rank_);
      codec_->send(floats_->load(s.block), s.memory, draw, size_, s.message);
    }
  }

  void decode(const Turn& turn) override {
    for (const Received& r : receives_) {
      const Draw draw = Draw::of(seed_, turn.step, r.block.begin, rank_);
      const std::span<float> values = floats_->room(r.block);
      codec_->combine(r.messages, draw, values);
      floats_->store(r.block, values);
    }
  }

 private:
  struct Sent {
    Block block;
    std::byte* message;
    Memory memory;
  };
  struct Received {
    Block block;
    std::vector<const std::byte*> messages;
  };

  static Collective travels_by(Collective kind, const Codec& codec) {
    if (kind == Collective::reduce_scatter) return Collective::all_to_all;
    return kind == Collective::all_reduce && codec.adds() ? kind : Collective::all_gather;
  }
  static DType dtype_of(Collective kind, const Codec& codec) {
    return kind == Collective::all_reduce ? codec.message_dtype() : DType::uint8;
  }
  void sends(const CodingSpace& space, Block block, std::byte* message) {
    sends_.push_back({block, message, memory_of(space, *codec_, block)});
  }

  const std::shared_ptr<const Codec> codec_;
  const Floats floats_;
  const int rank_, size_;
  const uint64_t seed_;
  HostBytes buffer_;
  std::vector<Sent> sends_;
  std::vector<Received> receives_;
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
      matrices_.push_back({b, t.rows, t.cols(), memory_of(space, *codec_, b), first.at(b), sums});
      next += count;
      (is_first_ ? reads_ : writes_).push_back(b);
    }
  }

  void encode(const Turn& turn) override {
    for (Matrix& m : matrices_) {
      if (is_first_) {
        const Draw draw = Draw::of(space_.seed, turn.step, m.block.begin, space_.rank);
        codec_->matrices()->first(floats_->load(m.block), m.rows, m.memory, draw, m.sums);
      } else {
        codec_->matrices()->second(m.rows, m.cols, m.memory, m.first, m.sums);
      }
    }
  }

  void decode(const Turn&) override {
    if (is_first_) return;  // its sums are what the second round is made of
    for (Matrix& m : matrices_) {
      const std::span<float> values = floats_->room(m.block);
      codec_->matrices()->finish(m.rows, m.first, m.sums, m.memory, values);
      floats_->store(m.block, values);
    }
  }

 private:
  struct Matrix {
    Block block;
    int64_t rows, cols;
    Memory memory;
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
}

void CodedOp::travels(std::byte* buffer, int64_t bytes) {
  const Span span{buffer, bytes / itemsize(request_.dtype)};
  request_.recv = {span};
  if (request_.kind == Collective::all_to_all) request_.send = {span};
}

std::vector<std::unique_ptr<CodedOp>> make_host_coded_ops(const CodingSpace& space) {
  const auto floats = std::make_shared<ArenaFloats>(space.plan, space.arena);
  RoundOp::FirstSums first;
  std::vector<std::unique_ptr<CodedOp>> out;
  for (const Op& op : space.plan.ops()) {
    const auto codec = make_codec(op.codec);
    if (codec && codec->memories() > 0 && !space.memory) {
      throw UsageError("codec '" + op.codec + "' needs a memory of what it has not sent");
    }
    if (!codec) {
      out.push_back(nullptr);
    } else if (codec->matrices() && op.kind != Collective::all_reduce) {
      out.push_back(std::make_unique<RoundOp>(space, op, codec, floats, first));
    } else {
      out.push_back(std::make_unique<MessagesOp>(space, op, codec, floats));
    }
  }
  return out;
}

std::vector<std::unique_ptr<CodedOp>> make_coded_ops(const CodingSpace& space) {
  return space.device ? make_device_coded_ops(space) : make_host_coded_ops(space);
}

}  // namespace usbyte
