// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/plan.h"

namespace usbyte {
namespace {

class Coder {
 public:
  Coder(const Plan& plan, std::span<const std::string> codec_of, bool sharded)
      : plan_(plan), codec_of_(codec_of), sharded_(sharded), last_(plan.tensors().size()) {
    for (size_t i = 0; i < plan.ops().size(); ++i) {
      const bool gathers = plan.ops()[i].kind == Collective::all_gather;
      for (int t : plan.tensors_of(plan.ops()[i])) {
        LastOps& last = last_[static_cast<size_t>(t)];
        (gathers ? last.gather : last.reduction) = static_cast<int>(i);
      }
    }
  }

  std::vector<Op> ops() {
    for (size_t i = 0; i < plan_.ops().size(); ++i) {
      // What waits for a first round leaves the network to the op behind that one.
      std::vector<Op> waiting = std::exchange(second_rounds_, {});
      const Op& op = plan_.ops()[i];
      if (op.codec != "none" || op.dimension >= 0) {
        out_.push_back(op);
      } else {
        add(op, static_cast<int>(i));
      }
      std::ranges::move(waiting, std::back_inserter(out_));
    }
    std::ranges::move(second_rounds_, std::back_inserter(out_));
    return std::move(out_);
  }

 private:
  struct CodedBlock {
    std::string codec;
    Block block;
  };
  struct LastOps {  // that touch a tensor
    int reduction = -1, gather = -1;
  };

  // Ops for each codec that the op's tensors have.
  void add(const Op& op, int index) {
    std::vector<std::string> order;  // of codecs, as their first tensors come
    std::map<std::string, std::vector<Block>> blocks;
    for (Block block : op.blocks) {
      for (const auto& [codec, part] : parts_of(op.kind, index, block)) {
        if (blocks[codec].empty()) order.push_back(codec);
        blocks[codec].push_back(part);
      }
    }
    fence_ |= op.fence;
    for (const std::string& spec : order) {
      const auto codec = make_codec(spec);
      Op coded{op.kind, std::move(blocks[spec]), op.window_bytes, std::exchange(fence_, false),
               spec};
      if (!codec && order.size() == 1) coded.route = op.route;
      if (codec && codec->matrices() && op.kind == Collective::all_reduce) {
        coded.kind = Collective::reduce_scatter;
        second_rounds_.push_back(coded);
        second_rounds_.back().kind = Collective::all_gather;
        second_rounds_.back().fence = false;
      } else if (codec && !codec->relays()) {
        coded.kind = Collective::all_reduce;
      }
      out_.push_back(std::move(coded));
    }
  }

  // Parts of tensors with one codec each, neighbours of the same joined.
  std::vector<CodedBlock> parts_of(Collective kind, int index, Block block) {
    const bool gathers = kind == Collective::all_gather;
    std::vector<CodedBlock> out;
    for (int t : plan_.tensors_of({Collective::all_reduce, {block}})) {
      const TensorSpec& tensor = plan_.tensors()[static_cast<size_t>(t)];
      const auto codec = codec_for(t);
      if (codec && codec->matrices()) {
        if (goes_as_a_whole(t, kind, index)) {
          out.push_back({codec->spec(), {tensor.offset, tensor.end()}});
        }
        continue;
      }
      if (codec && gathers && !codec->relays()) continue;  // all reduced already
      const std::string spec = codec ? codec->spec() : "none";
      const Block part{std::max(block.begin, tensor.offset), std::min(block.end, tensor.end())};
      if (!out.empty() && out.back().codec == spec && out.back().block.end == part.begin) {
        out.back().block.end = part.end;
      } else {
        out.push_back({spec, part});
      }
    }
    for (CodedBlock& part : out) {  // cut as they were scattered
      if (gathers && sharded_) part.codec = "none";
    }
    return out;
  }

  std::shared_ptr<const Codec> codec_for(int t) const {
    const TensorSpec& tensor = plan_.tensors()[static_cast<size_t>(t)];
    auto codec = make_codec(codec_of_[static_cast<size_t>(t)]);
    if (codec && sharded_ && (!codec->relays() || codec->matrices())) {
      throw UsageError("codec " + codec->spec() +
                       " does not support a sharded optimizer: no rank gets " +
                       "a part of a reduced gradient");
    }
    if (!codec || !codec->matrices()) return codec;
    return codec->matrices()->pays(tensor.rows, tensor.cols()) ? codec : nullptr;
  }

  // In the last op that reduces some of it, and in the last that gathers, once each.
  bool goes_as_a_whole(int t, Collective kind, int index) {
    const LastOps last = last_[static_cast<size_t>(t)];
    const bool gathers = kind == Collective::all_gather;
    if ((gathers ? last.gather : last.reduction) != index) return false;
    const Collective reduced = plan_.ops()[static_cast<size_t>(last.reduction)].kind;
    if (gathers && reduced == Collective::all_reduce) return false;  // has its second round there
    return whole_.insert({t, gathers}).second;
  }

  const Plan& plan_;
  const std::span<const std::string> codec_of_;
  const bool sharded_;
  std::vector<LastOps> last_;             // by tensor
  std::set<std::pair<int, bool>> whole_;  // tensors that are scattered, or gathered, as a whole
  std::vector<Op> out_, second_rounds_;
  bool fence_ = false;
};

}  // namespace

Plan with_codecs(const Plan& plan, std::span<const std::string> codec_of, bool sharded) {
  if (codec_of.size() != plan.tensors().size()) {
    throw UsageError("with_codecs: " + std::to_string(codec_of.size()) + " codecs for " +
                     std::to_string(plan.tensors().size()) + " tensors");
  }
  return plan.with_ops(plan.policy(), Coder(plan, codec_of, sharded).ops());
}

}  // namespace usbyte
