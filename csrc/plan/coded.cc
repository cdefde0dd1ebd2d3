#include <algorithm>
#include <map>

#include "usbyte/error.h"
#include "usbyte/plan.h"

namespace usbyte {
namespace {

// The block's parts of tensors with one codec each, neighbours of the same joined.
std::vector<std::pair<std::string, Block>> parts_of(const Plan& plan, Block block,
                                                    std::span<const std::string> codec_of) {
  std::vector<std::pair<std::string, Block>> out;
  for (int t : plan.tensors_of({Collective::all_reduce, {block}})) {
    const TensorSpec& tensor = plan.tensors()[static_cast<size_t>(t)];
    const std::string& codec = codec_of[static_cast<size_t>(t)];
    const int64_t end = std::min(block.end, tensor.end());
    if (!out.empty() && out.back().first == codec) {
      out.back().second.end = end;
    } else {
      out.push_back({codec, {std::max(block.begin, tensor.offset), end}});
    }
  }
  return out;
}

}  // namespace

Plan with_codecs(const Plan& plan, std::span<const std::string> codec_of) {
  if (codec_of.size() != plan.tensors().size()) {
    throw UsageError("with_codecs: " + std::to_string(codec_of.size()) + " codecs for " +
                     std::to_string(plan.tensors().size()) + " tensors");
  }
  std::vector<Op> ops;
  for (const Op& op : plan.ops()) {
    std::vector<std::string> order;  // of codecs, as their first tensors come
    std::map<std::string, std::vector<Block>> blocks;
    for (Block block : op.blocks) {
      for (const auto& [codec, part] : parts_of(plan, block, codec_of)) {
        if (codec != "none" && op.kind == Collective::all_gather) continue;  // all reduced already
        if (blocks[codec].empty()) order.push_back(codec);
        blocks[codec].push_back(part);
      }
    }
    for (const std::string& codec : order) {
      const bool first = codec == order.front();
      const Collective kind = codec == "none" ? op.kind : Collective::all_reduce;
      ops.push_back({kind, std::move(blocks[codec]), op.window_bytes, op.fence && first, codec});
    }
  }
  return plan.with(plan.policy(), std::move(ops));
}

}  // namespace usbyte
