#include "usbyte/line_choice.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "usbyte/adatopk.h"
#include "usbyte/codec.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

using Ways = std::vector<std::optional<LineWay>>;  // by op

constexpr double kPays = 0.5;          // 8 bytes for each element picked, 4 for each there is
constexpr double kClearly = 0.001;     // of the step: less is not worth a change
constexpr int64_t kMostOps = 500'000;  // simulated
constexpr std::string_view kTopk = "topk:", kForgets = ",feedback=off";

bool has_two_lines(const Topology& mesh) {
  return std::ranges::count_if(mesh.dimensions, [](auto& d) { return d.size > 1; }) == 2;
}

const Dimension& at(const Topology& mesh, int dimension) {
  return mesh.dimensions[static_cast<size_t>(dimension)];
}

struct Codecs {
  std::string scatter, sum;
};

// AdaTopK: what both dimensions pick, so that each takes about as long as the other.
Codecs adapted(const std::string& spec, const Topology& mesh, int inside, int between) {
  double ratio = 0;
  const char* const end = spec.data() + spec.size();
  const char* const behind = std::from_chars(spec.data() + kTopk.size(), end, ratio).ptr;
  // Of a byte in an all_reduce without codecs.
  const auto time_s = [](const Dimension& d, double bytes) {
    return d.moved_bytes(bytes, true) / d.bytes_per_s;
  };
  const double times_s[] = {time_s(at(mesh, inside), 1),
                            time_s(at(mesh, between), 1.0 / at(mesh, inside).size)};
  const std::vector<double> ratios = adatopk_ratios(times_s, ratio);
  std::vector<std::string> found = adatopk_codecs(times_s, ratio);
  for (size_t i = 0; i < found.size(); ++i) {
    if (ratios[i] == ratio) {
      found[i] = spec;
    } else if (found[i] != "none") {
      found[i] += std::string(behind, end);  // feedback, if it is off
    }
  }
  return {found[0], found[1]};
}

// What both dimensions have; nothing where one of them cannot.
std::optional<Codecs> in_both(const std::string& spec, const Topology& mesh, int inside,
                              int between) {
  if (spec.starts_with(kTopk)) return adapted(spec, mesh, inside, between);
  const auto codec = make_codec(spec);
  const std::string remembers = codec->remembers();
  if (!codec->relays() || !(remembers.empty() || remembers == "unsent")) return std::nullopt;
  return Codecs{spec, spec};
}

// Of so many elements, those that a codec picks in any step; all where that cannot be told.
int64_t picked(const std::string& spec, int64_t count) {
  const auto codec = make_codec(spec);
  if (!codec || !codec->picks() || codec->at_step(0) != spec) return count;
  return codec->picks()->picked(count);
}

// A codec that gathers all elements of shards that can differ from zero; "none" if they are many.
std::string exact_gather(const Op& op, const Codecs& codecs, const Topology& mesh, int inside,
                         int between) {
  const int shards = at(mesh, inside).size;
  const int64_t ranks = at(mesh, between).size;
  double ratio = 0;  // that is enough for every shard
  for (Block block : op.blocks) {
    for (int rank = 0; rank < shards; ++rank) {
      const int64_t count = shard(block, rank, shards).numel();
      if (count == 0) continue;
      const int64_t most = codecs.sum == "none" ? ranks * shards * picked(codecs.scatter, count)
                                                : ranks * picked(codecs.sum, count);
      ratio = std::max(ratio, static_cast<double>(most) / static_cast<double>(count));
    }
  }
  if (ratio > kPays) return "none";
  // Rounded up to two digits, so that there are few.
  const double digit = std::pow(10, std::floor(std::log10(ratio)) - 1);
  char text[32];
  std::snprintf(text, sizeof text, "topk:%.2g", std::ceil(ratio / digit + 1e-9) * digit);
  return make_codec(text + std::string(kForgets))->spec();
}

bool is_cast(const std::string& spec) { return spec == "fp16" || spec == "bf16"; }

class Chooser {
 public:
  Chooser(const Plan& plan, const Profile& profile, const NetworkModel& network, Overlap overlap,
          const CodecCosts& costs)
      : plan_(plan),
        mesh_(*network.topology),
        simulator_(profile, network, overlap, false, costs),
        best_(plan.ops().size()),
        best_s_(simulator_.step_s(plan)) {
    for (const Op& op : plan.ops()) ways_.push_back(line_ways(op, mesh_));
  }

  Plan choose() {
    size_t most = 0;
    for (const auto& ways : ways_) most = std::max(most, ways.size());
    for (size_t way = 0; way < most; ++way) try_all(way);
    std::vector<size_t> order(ways_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [this](size_t a, size_t b) {
      return plan_.bytes(plan_.ops()[a]) > plan_.bytes(plan_.ops()[b]);
    });
    for (bool changes = true; changes;) {
      changes = false;
      for (size_t op : order) changes |= improve(op);
    }
    return along_lines(plan_, mesh_, best_);
  }

 private:
  void try_all(size_t way) {
    Ways all(ways_.size());
    for (size_t i = 0; i < all.size(); ++i) {
      if (!ways_[i].empty()) all[i] = ways_[i][std::min(way, ways_[i].size() - 1)];
    }
    consider(std::move(all));
  }

  bool improve(size_t op) {
    if (ways_[op].empty()) return false;
    bool changes = false;
    for (size_t way = 0; way <= ways_[op].size() && simulator_.ops() < kMostOps; ++way) {
      Ways other = best_;
      other[op] = way == 0 ? std::nullopt : std::optional(ways_[op][way - 1]);
      if (other[op] != best_[op]) changes |= consider(std::move(other));
    }
    return changes;
  }

  bool consider(Ways ways) {
    const double step_s = simulator_.step_s(along_lines(plan_, mesh_, ways));
    if (!(step_s < best_s_ * (1 - kClearly))) return false;
    best_s_ = step_s;
    best_ = std::move(ways);
    return true;
  }

  const Plan& plan_;
  const Topology& mesh_;
  Simulator simulator_;
  std::vector<std::vector<LineWay>> ways_;  // by op
  Ways best_;
  double best_s_;
};

}  // namespace

std::vector<LineWay> line_ways(const Op& op, const Topology& mesh) {
  std::vector<LineWay> out;
  if (!has_line_ways(op) || !has_two_lines(mesh)) return out;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (at(mesh, d).size == 1) continue;
    const auto [inside, between] = scatter_and_sum(mesh, d);
    const auto add = [&, inside = inside, between = between](const Codecs& codecs) {
      const std::string gather = exact_gather(op, codecs, mesh, inside, between);
      out.push_back({d, codecs.scatter, codecs.sum, "none"});
      if (gather != "none") out.push_back({d, codecs.scatter, codecs.sum, gather});
    };
    add({"none", op.codec});
    const auto both = in_both(op.codec, mesh, inside, between);
    if (!both || both->scatter == "none") continue;
    if (is_cast(op.codec)) {
      out.push_back({d, op.codec, op.codec, op.codec});
    } else {
      add(*both);
    }
  }
  return out;
}

std::vector<std::string> line_codecs(const Plan& plan, const Topology& mesh) {
  std::set<std::string> found;
  for (const Op& op : plan.ops()) {
    for (const LineWay& way : line_ways(op, mesh)) {
      found.insert({way.scatter, way.sum, way.gather});
    }
  }
  found.erase("none");
  return {found.begin(), found.end()};
}

Plan with_lines(const Plan& plan, const Profile& profile, const NetworkModel& network,
                Overlap overlap, const CodecCosts& costs) {
  if (!network.topology || !has_two_lines(*network.topology)) return plan;
  return Chooser(plan, profile, network, overlap, costs).choose();
}

}  // namespace usbyte
