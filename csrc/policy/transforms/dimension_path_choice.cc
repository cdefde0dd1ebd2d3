// SPDX-License-Identifier: Apache-2.0
#include "routing.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "adatopk.h"
#include "usbyte/codec.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

using Paths = std::vector<std::optional<DimensionPath>>;  // by op

constexpr double kPays = 0.5;          // 8 bytes for each element picked, 4 for each there is
constexpr double kRoom = 1.2;          // for what a codec picks, whose number is rounded
constexpr double kClearly = 1e-6;      // of the step: less may be rounding
constexpr double kWorthALoss = 0.02;   // likewise, for one more op that loses something twice
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

// AdaTopK: what both dimensions pick, so that messages take about as long in each: those to the
// ranks that add up, and those from all to all.
Codecs adapted(const std::string& spec, const Topology& mesh, int inside, int between) {
  double ratio = 0;
  const char* const end = spec.data() + spec.size();
  const char* const behind = std::from_chars(spec.data() + kTopk.size(), end, ratio).ptr;
  const Dimension &first = at(mesh, inside), &second = at(mesh, between);
  const double shard = 1.0 / first.size;  // of a byte
  const double times_s[] = {first.moved_bytes(1, false) / first.bytes_per_s,
                            second.moved_bytes(second.size * shard, false) / second.bytes_per_s};
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
  if (!codec || !codec->selection() || codec->at_step(0) != codec->spec()) return count;
  return codec->selection()->selected_count(count);
}

// Elements of a shard that can differ from zero once it is added up. What a rank has not sent joins
// the sum of a codec, so that there is no telling by what was scattered then.
int64_t left(const Codecs& codecs, int64_t count, int64_t shards, int64_t ranks) {
  const int64_t most = codecs.sum == "none" ? ranks * shards * picked(codecs.scatter, count)
                                            : ranks * picked(codecs.sum, count);
  return std::min(most, count);
}

// What gathers all of these, if they are few enough.
std::string exact_gather(const Codecs& codecs, int64_t shards, int64_t ranks) {
  constexpr int64_t kMany = 1'000'000;
  const double ratio = kRoom * static_cast<double>(left(codecs, kMany, shards, ranks)) / kMany;
  if (ratio > kPays) return "none";
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, ratio, std::chars_format::general, 2);
  return make_codec(std::string(kTopk) + std::string(text, end.ptr) + std::string(kForgets))
      ->spec();
}

bool gathers_all(const std::string& gather, const Op& op, const Codecs& codecs, int shards,
                 int64_t ranks) {
  for (Block block : op.blocks) {
    for (int rank = 0; rank < shards; ++rank) {
      const int64_t count = shard(block, rank, shards).numel();
      if (picked(gather, count) < left(codecs, count, shards, ranks)) return false;
    }
  }
  return true;
}

bool is_cast(const std::string& spec) { return spec == "fp16" || spec == "bf16"; }

// Of any op with this codec, in a mesh of two dimensions.
std::vector<DimensionPath> paths_of(const std::string& spec, const Topology& mesh) {
  const std::string codec = make_codec(spec)->spec();  // one spelling
  std::vector<int> dimensions(static_cast<size_t>(mesh.ndim()));
  std::iota(dimensions.begin(), dimensions.end(), 0);
  std::erase_if(dimensions, [&](int d) { return at(mesh, d).size == 1; });
  // Of paths that are as fast, the first is taken.
  std::ranges::stable_sort(dimensions, {}, [&](int d) { return at(mesh, d).bytes_per_s; });
  std::vector<DimensionPath> out;
  for (int d : dimensions) {
    const auto [inside, between] = scatter_and_sum(mesh, d);
    const int shards = at(mesh, inside).size, ranks = at(mesh, between).size;
    const auto add = [&](const Codecs& codecs) {
      out.push_back({d, codecs.scatter, codecs.sum, "none"});
      const std::string gather = exact_gather(codecs, shards, ranks);
      if (gather != "none") out.push_back({d, codecs.scatter, codecs.sum, gather});
    };
    add({"none", codec});
    const auto both = in_both(codec, mesh, inside, between);
    if (!both || both->scatter == "none") continue;
    if (is_cast(codec)) {
      out.push_back({d, codec, codec, codec});
    } else {
      add(*both);
    }
  }
  return out;
}

bool has_paths(const std::string& codec, const Topology& mesh) {
  return has_two_lines(mesh) && has_dimension_paths({Collective::all_reduce, {}, 0, false, codec});
}

class Chooser {
 public:
  Chooser(const Plan& plan, const Profile& profile, const NetworkModel& network, Overlap overlap,
          const CodecCosts& costs)
      : plan_(plan),
        mesh_(*network.topology),
        simulator_(profile, network, overlap, false, costs),
        best_(plan.ops().size()),
        late_s_(simulator_.lateness_s(plan)) {
    for (const Op& op : plan.ops()) paths_.push_back(dimension_paths(op, mesh_));
  }

  Plan choose() {
    if (late_s_ <= 0) return plan_;
    size_t most = 0;
    for (const auto& paths : paths_) most = std::max(most, paths.size());
    for (size_t path = 0; path < most; ++path) try_all(path);
    std::vector<size_t> order(paths_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [this](size_t a, size_t b) {
      return plan_.bytes(plan_.ops()[a]) > plan_.bytes(plan_.ops()[b]);
    });
    for (bool changes = true; changes;) {
      changes = false;
      for (size_t op : order) changes |= improve(op);
    }
    return along_dimensions(plan_, mesh_, best_);
  }

 private:
  void try_all(size_t path) {
    Paths all(paths_.size());
    for (size_t i = 0; i < all.size(); ++i) {
      if (!paths_[i].empty()) all[i] = paths_[i][std::min(path, paths_[i].size() - 1)];
    }
    consider(std::move(all));
  }

  bool improve(size_t op) {
    if (paths_[op].empty()) return false;
    bool changes = false;
    for (size_t path = 0; path <= paths_[op].size() && simulator_.ops() < kMostOps; ++path) {
      Paths other = best_;
      other[op] = path == 0 ? std::nullopt : std::optional(paths_[op][path - 1]);
      if (other[op] != best_[op]) changes |= consider(std::move(other));
    }
    return changes;
  }

  // Of paths that hide everything, those that come earlier stand more.
  bool consider(Paths paths) {
    const double late_s = simulator_.lateness_s(along_dimensions(plan_, mesh_, paths));
    const bool loses_more = losses(paths) > losses(best_);
    const double won_s =
        loses_more ? std::max(late_s_, 0.0) - std::max(late_s, 0.0) : late_s_ - late_s;
    const double step_s = simulator_.iteration_s() + std::max(late_s_, 0.0);
    if (!(won_s > step_s * (loses_more ? kWorthALoss : kClearly))) return false;
    late_s_ = late_s;
    best_ = std::move(paths);
    return true;
  }

  // Ops that lose something twice.
  static int64_t losses(const Paths& paths) {
    return std::ranges::count_if(paths, [](const auto& path) {
      return path && path->scatter != "none" && path->sum != "none" && !is_cast(path->sum);
    });
  }

  const Plan& plan_;
  const Topology& mesh_;
  Simulator simulator_;
  std::vector<std::vector<DimensionPath>> paths_;  // by op
  Paths best_;
  double late_s_;  // how late what goes these paths is
};

}  // namespace

std::vector<DimensionPath> dimension_paths(const Op& op, const Topology& mesh) {
  if (!has_dimension_paths(op) || !has_paths(op.codec, mesh)) return {};
  std::vector<DimensionPath> out = paths_of(op.codec, mesh);
  std::erase_if(out, [&](const DimensionPath& path) {
    if (path.gather == "none" || is_cast(path.gather)) return false;
    const auto [inside, between] = scatter_and_sum(mesh, path.sum_dimension);
    return !gathers_all(path.gather, op, {path.scatter, path.sum}, at(mesh, inside).size,
                        at(mesh, between).size);
  });
  return out;
}

std::vector<std::string> dimension_codecs(const std::string& codec, const Topology& mesh) {
  std::set<std::string> found;
  if (has_paths(codec, mesh)) {
    for (const DimensionPath& path : paths_of(codec, mesh)) {
      found.insert({path.scatter, path.sum, path.gather});
    }
  }
  found.erase("none");
  return {found.begin(), found.end()};
}

Plan with_dimension_paths(const Plan& plan, const Profile& profile, const NetworkModel& network,
                          Overlap overlap, const CodecCosts& costs) {
  if (!network.topology || !has_two_lines(*network.topology)) return plan;
  return Chooser(plan, profile, network, overlap, costs).choose();
}

}  // namespace usbyte
