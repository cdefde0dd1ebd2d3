// SPDX-License-Identifier: Apache-2.0
#include "strategy.h"

#include <algorithm>
#include <array>
#include <set>

#include "cluster.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr std::array<std::string_view, 9> kShort = {"C",   "D", "AR", "RS", "AG",
                                                    "A2A", "R", "B",  "G"};
constexpr std::array<std::string_view, 2> kProcessors = {"gpu", "cpu"};

bool codes(StageKind kind) { return kind == StageKind::encode || kind == StageKind::decode; }

using Path = std::vector<StageKind>;
using enum StageKind;

const std::vector<Path>& flat_paths() {
  static const std::vector<Path> paths = {{all_reduce},
                                          {reduce_scatter, all_gather},
                                          {encode, all_reduce, decode},
                                          {encode, all_gather, decode},
                                          {encode, all_to_all, decode, all_gather},
                                          {encode, all_to_all, decode, encode, all_gather, decode},
                                          {encode, gather, decode, broadcast},
                                          {encode, gather, decode, encode, broadcast, decode}};
  return paths;
}

struct Ends {
  Path first, second;  // inside the node, before and after
};

const std::vector<Ends>& ends() {
  static const std::vector<Ends> all = [] {
    std::vector<Ends> out;
    for (const Path& first : {Path{reduce_scatter}, Path{encode, all_to_all, decode}}) {
      for (const Path& second : {Path{all_gather}, Path{encode, all_gather, decode}}) {
        out.push_back({first, second});
      }
    }
    for (const Path& first : {Path{reduce}, Path{encode, gather, decode}}) {
      for (const Path& second : {Path{broadcast}, Path{encode, broadcast, decode}}) {
        out.push_back({first, second});
      }
    }
    return out;
  }();
  return all;
}

void append(Strategy& strategy, const Path& path, Level level) {
  for (StageKind kind : path) strategy.stages.push_back({kind, level});
}

// With each codec on each of the processors.
void add_tagged(const Strategy& untagged, std::span<const Processor> processors,
                std::set<Strategy>& seen, std::vector<Strategy>& out) {
  std::vector<size_t> coded;
  for (size_t i = 0; i < untagged.stages.size(); ++i) {
    if (codes(untagged.stages[i].kind)) coded.push_back(i);
  }
  size_t combinations = 1;
  for (size_t i = 0; i < coded.size(); ++i) combinations *= processors.size();
  for (size_t combination = 0; combination < combinations; ++combination) {
    Strategy tagged = untagged;
    size_t digits = combination;
    for (size_t i : coded) {
      tagged.stages[i].processor = processors[digits % processors.size()];
      digits /= processors.size();
    }
    if (seen.insert(tagged).second) out.push_back(std::move(tagged));
  }
}

Stage parse_stage(std::string_view token, std::string_view text) {
  Stage stage{};
  const size_t bracket = token.find('[');
  const auto kind = std::find(kShort.begin(), kShort.end(), token.substr(0, bracket));
  bool sound = kind != kShort.end();
  if (sound) {
    stage.kind = static_cast<StageKind>(kind - kShort.begin());
    sound = codes(stage.kind) == (bracket != token.npos);
  }
  if (sound && codes(stage.kind)) {
    const std::string_view tag = token.substr(bracket);
    sound = tag == "[gpu]" || tag == "[cpu]";
    stage.processor = tag == "[cpu]" ? Processor::cpu : Processor::gpu;
  }
  if (!sound) {
    throw UsageError("strategy '" + std::string(text) + "': '" + std::string(token) +
                     "' is none of AR, RS, AG, A2A, R, B, G, C[gpu], C[cpu], D[gpu], D[cpu]");
  }
  return stage;
}

}  // namespace

bool Strategy::compresses() const {
  return std::any_of(stages.begin(), stages.end(),
                     [](const Stage& stage) { return codes(stage.kind); });
}

Strategy Strategy::on(Processor processor) const {
  Strategy out = *this;
  for (Stage& stage : out.stages) {
    if (codes(stage.kind)) stage.processor = processor;
  }
  return out;
}

std::string Strategy::describe() const {
  std::string out;
  for (size_t i = 0; i < stages.size(); ++i) {
    const Stage& stage = stages[i];
    if (i > 0) out += stage.level == stages[i - 1].level ? " " : " | ";
    out += kShort[static_cast<size_t>(stage.kind)];
    if (codes(stage.kind)) {
      out += "[" + std::string(kProcessors[static_cast<size_t>(stage.processor)]) + "]";
    }
  }
  return out;
}

Strategy Strategy::parse(std::string_view text) {
  constexpr std::array<Level, 3> kLevels = {Level::intra, Level::inter, Level::intra};
  const auto bars = static_cast<size_t>(std::count(text.begin(), text.end(), '|'));
  Strategy out;
  size_t part = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view token = text.substr(begin, end - begin);
    begin = end + 1;
    if (token == "|") {
      ++part;
    } else if (!token.empty()) {
      out.stages.push_back(parse_stage(token, text));
      out.stages.back().level = bars == 0 ? Level::flat : kLevels[std::min<size_t>(part, 2)];
    }
  }
  if (out.stages.empty() || (bars != 0 && bars != 2) || out.describe() != text) {
    throw UsageError("'" + std::string(text) +
                     "' is no strategy; one looks like 'C[gpu] AG D[cpu]' or 'RS | AR | AG'");
  }
  return out;
}

std::vector<Strategy> decision_tree(const CompressionCluster& cluster) {
  std::vector<Processor> processors;
  if (cluster.gpu) processors.push_back(Processor::gpu);
  if (cluster.cpu) processors.push_back(Processor::cpu);
  std::set<Strategy> seen;
  std::vector<Strategy> out;
  for (const Path& path : flat_paths()) {
    Strategy strategy;
    append(strategy, path, Level::flat);
    add_tagged(strategy, processors, seen, out);
  }
  if (cluster.two_levels()) {
    for (const auto& [first, second] : ends()) {
      for (const Path& path : flat_paths()) {
        Strategy strategy;
        append(strategy, first, Level::intra);
        append(strategy, path, Level::inter);
        append(strategy, second, Level::intra);
        add_tagged(strategy, processors, seen, out);
      }
    }
  }
  std::stable_partition(out.begin(), out.end(), [](const Strategy& s) { return !s.compresses(); });
  return out;
}

}  // namespace usbyte
