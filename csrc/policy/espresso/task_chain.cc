// SPDX-License-Identifier: Apache-2.0
#include "task_chain.h"

#include <utility>

namespace usbyte {
namespace {

// Follows one gradient along the stages of a strategy.
class Walk {
 public:
  Walk(const CompressionCluster& cluster, const CompressionJob::Tensor& tensor, const Codec* codec)
      : cluster_(cluster), tensor_(tensor), codec_(codec), elements_(tensor.numel) {}

  /// Payload of a collective or, of a codec, bytes of gradients of one message; -1: cannot be.
  double step(const Strategy& strategy, size_t index);
  /// Nothing is left to be done.
  bool complete(bool two_levels) const {
    const auto done = [](const Holding& h) { return h.summed && h.kind == Holding::all; };
    return messages_ == 0 && done(holds_[1]) && (!two_levels || done(holds_[0]));
  }
  /// Parts that the decoder of the last stage had messages of, and how many of each.
  int decoded_parts() const { return restored_ ? decoded_ : 1; }
  int decoded_messages() const { return restored_ ? 1 : decoded_; }
  int ranks(Level level) const { return link(level).ranks; }
  const LinkCosts& link(Level level) const {
    return level == Level::flat    ? cluster_.flat
           : level == Level::intra ? cluster_.intra
                                   : cluster_.inter;
  }

 private:
  // What a rank has of what the ranks that it last communicated with have.
  struct Holding {
    enum Kind { all, part, root } kind = all;
    int64_t elements = 0;  // of which it is a part
    bool summed = false;   // over these ranks
  };

  Holding& hold(Level level) { return holds_[level == Level::intra ? 0 : 1]; }
  int64_t part(Level level) const { return (elements_ + ranks(level) - 1) / ranks(level); }
  double dense_bytes(int64_t elements) const {
    return static_cast<double>(elements * itemsize(tensor_.dtype));
  }
  double message_bytes(int64_t elements) const {
    return static_cast<double>(codec_->message_bytes(elements));
  }
  double encode(const Stage& stage, StageKind next);
  double decode(Level level);
  double collective(StageKind kind, Level level);

  const CompressionCluster& cluster_;
  const CompressionJob::Tensor& tensor_;
  const Codec* codec_;
  int64_t elements_;
  int messages_ = 0;  // held; 0: not coded
  int decoded_ = 0;
  int64_t coded_elements_ = 0;  // of each of them
  bool scattered_ = false;      // messages are for one rank each
  bool restores_ = false;       // each message held is another part
  bool restored_ = false;       // as the last that were decoded
  int users_ = 1;               // ranks of a node that use its link at a time
  std::array<Holding, 2> holds_;
};

double Walk::encode(const Stage& stage, StageKind next) {
  if (messages_ > 0 || !codec_ || codec_->matrices()) return -1;
  scattered_ = next == StageKind::all_to_all;
  // A majority of majorities is none.
  if (!codec_->relays() && (scattered_ || decoded_ > 0)) return -1;
  messages_ = scattered_ ? ranks(stage.level) : 1;
  coded_elements_ = scattered_ ? part(stage.level) : elements_;
  return 4.0 * static_cast<double>(elements_);
}

double Walk::decode(Level level) {
  if (messages_ == 0 || scattered_) return -1;
  decoded_ = messages_;
  const double bytes = 4.0 * static_cast<double>(coded_elements_);
  elements_ = coded_elements_;
  if (restores_) {
    elements_ = hold(level).elements;
    hold(level).kind = Holding::all;
  }
  messages_ = 0;
  restored_ = std::exchange(restores_, false);
  return bytes;
}

double Walk::collective(StageKind kind, Level level) {
  Holding& held = hold(level);
  const int n = ranks(level);
  const bool coded = messages_ > 0, whole = held.kind == Holding::all;
  const bool sums = kind != StageKind::broadcast && !(kind == StageKind::all_gather && !whole);
  if (sums && held.summed) return -1;
  double bytes = -1;
  switch (kind) {
    case StageKind::all_reduce:
      if (!whole || (coded && (scattered_ || messages_ != 1 || !codec_->adds()))) return -1;
      bytes = coded ? message_bytes(elements_) : dense_bytes(elements_);
      break;
    case StageKind::reduce_scatter:
    case StageKind::reduce:
      if (!whole || coded) return -1;
      bytes = dense_bytes(elements_);
      if (kind == StageKind::reduce) {
        held.kind = Holding::root;
      } else {
        held = {Holding::part, elements_, true};
        elements_ = part(level);
      }
      break;
    case StageKind::all_to_all:
      if (!whole || !scattered_) return -1;
      bytes = n * message_bytes(coded_elements_);
      held = {Holding::part, elements_, true};
      scattered_ = false;
      break;
    case StageKind::gather:
      if (!whole || !coded || scattered_ || messages_ != 1) return -1;
      bytes = n * message_bytes(coded_elements_);
      messages_ = n;
      held.kind = Holding::root;
      break;
    case StageKind::all_gather:
      if (held.kind == Holding::root || scattered_ || messages_ > 1) return -1;
      if (!coded && held.kind == Holding::all) return -1;
      // Messages that add are added, not gathered; the engine knows no other way.
      if (coded && whole && codec_->adds()) return -1;
      bytes = coded ? n * message_bytes(coded_elements_) : dense_bytes(held.elements);
      if (coded) {
        messages_ = n;
        restores_ = held.kind == Holding::part;
      } else {
        elements_ = held.elements;
        held.kind = Holding::all;
      }
      break;
    case StageKind::broadcast:
      if (held.kind != Holding::root || scattered_ || messages_ > 1) return -1;
      bytes = coded ? message_bytes(coded_elements_) : dense_bytes(elements_);
      held.kind = Holding::all;
      break;
    default:
      return -1;
  }
  held.summed |= sums;
  if (level == Level::intra) users_ = held.kind == Holding::part ? n : 1;
  return level == Level::inter ? users_ * bytes : bytes;
}

double Walk::step(const Strategy& strategy, size_t index) {
  const Stage& stage = strategy.stages[index];
  if ((stage.level == Level::flat) != (strategy.stages.front().level == Level::flat)) return -1;
  if (stage.level != Level::flat && !cluster_.two_levels()) return -1;
  if (stage.kind == StageKind::encode) {
    const bool last = index + 1 == strategy.stages.size();
    return last ? -1 : encode(stage, strategy.stages[index + 1].kind);
  }
  return stage.kind == StageKind::decode ? decode(stage.level)
                                         : collective(stage.kind, stage.level);
}

Resource resource_of(const Stage& stage) {
  if (stage.kind == StageKind::encode || stage.kind == StageKind::decode) {
    return stage.processor == Processor::gpu ? Resource::compute : Resource::cpu;
  }
  return stage.level == Level::intra ? Resource::intra : Resource::inter;
}

}  // namespace

std::array<double, kResources> TaskChain::load() const {
  std::array<double, kResources> out{};
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) out[resource[i]] += seconds[i];
  return out;
}

TaskChainBuilder::TaskChainBuilder(const CompressionCluster& cluster,
                                   const CompressionJob::Tensor& tensor)
    : cluster_(&cluster), tensor_(&tensor) {
  if (!is_floating(tensor.dtype) || tensor.codec.empty()) return;
  codec_ = make_codec(tensor.codec);
  if (!codec_) return;
  if (cluster.gpu) cost_[static_cast<size_t>(Processor::gpu)] = cluster.gpu->of(codec_->spec());
  if (cluster.cpu) cost_[static_cast<size_t>(Processor::cpu)] = cluster.cpu->of(codec_->spec());
}

std::optional<TaskChain> TaskChainBuilder::make(const Strategy& strategy) const {
  if (strategy.stages.empty() || strategy.stages.size() > kMostStages) return {};
  Walk walk(*cluster_, *tensor_, codec_.get());
  TaskChain chain;
  chain.count = static_cast<int>(strategy.stages.size());
  for (size_t i = 0; i < strategy.stages.size(); ++i) {
    const Stage& stage = strategy.stages[i];
    const double walked = walk.step(strategy, i);
    if (walked < 0) return {};
    const auto bytes = static_cast<int64_t>(walked);
    const std::optional<CodecCost>& cost = cost_[static_cast<size_t>(stage.processor)];
    chain.resource[i] = static_cast<uint8_t>(resource_of(stage));
    if (stage.kind == StageKind::encode || stage.kind == StageKind::decode) {
      if (!cost) return {};
      chain.seconds[i] = stage.kind == StageKind::encode
                             ? cost->encode_s(1, bytes)
                             : cost->decode_s(walk.decoded_parts(), walk.decoded_messages(), bytes);
    } else {
      chain.seconds[i] = walk.link(stage.level).of(stage.kind).time_s(bytes);
    }
  }
  if (!walk.complete(strategy.stages.front().level != Level::flat)) return {};
  double after_s = 0;
  for (size_t i = strategy.stages.size(); i-- > 0;) {
    chain.after_s[i] = after_s;
    after_s += chain.seconds[i];
  }
  return chain;
}

}  // namespace usbyte
