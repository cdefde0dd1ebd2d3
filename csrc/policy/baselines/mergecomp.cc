// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "policy/support/merging.h"

namespace usbyte {
namespace {

constexpr int kBoundaries = 512;  // between which groups may end
// Groupings of the tensors before a boundary: so many are all kept, of more the leading ones.
constexpr size_t kAll = 256, kLeading = 32;

// A way to group the tensors before a boundary, and how far it has come then.
struct Grouping {
  CodedProgress progress;
  double lateness_s = 0;
  int groups = 0;
  std::pair<int, size_t> before{0, 0};  // boundary and grouping that it adds a group to
};

// Those that no other leads; if there are too many, some from the least late to the latest.
std::vector<Grouping> leading(std::vector<Grouping> all) {
  std::stable_sort(all.begin(), all.end(), [](const Grouping& a, const Grouping& b) {
    return std::pair(a.lateness_s, a.progress.channel_s()) <
           std::pair(b.lateness_s, b.progress.channel_s());
  });
  std::vector<Grouping> front;
  for (Grouping& g : all) {
    const bool behind = std::any_of(front.begin(), front.end(), [&](const Grouping& f) {
      return f.progress.leads(g.progress);
    });
    if (!behind) front.push_back(std::move(g));
  }
  if (front.size() <= kLeading) return front;
  std::vector<Grouping> out;
  for (size_t i = 0; i < kLeading; ++i) {
    out.push_back(std::move(front[i * (front.size() - 1) / (kLeading - 1)]));
  }
  return out;
}

}  // namespace

// Wang, Wu and Ng count the sum of what groups take, less what overlaps. Where the model is exact,
// a group is one step of a dynamic programme over boundaries: what is to come depends on the
// groups before it only by how far channel and thread have come.
Plan mergecomp(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  Merging merging(profile, network, options);
  const int tensors = merging.tensors();
  std::vector<int> ends;  // where groups may end
  const int count = std::min(tensors, kBoundaries);
  for (int i = 0; i <= count; ++i) {
    ends.push_back(static_cast<int>(int64_t{i} * tensors / std::max(count, 1)));
  }
  std::vector<std::vector<Grouping>> groupings(ends.size());  // by boundary
  groupings[0].emplace_back();
  for (int to = 1; to <= count; ++to) {
    std::vector<Grouping> all;
    merging.start(ends[static_cast<size_t>(to)]);
    for (int from = to - 1; from >= 0; --from) {
      const size_t b = static_cast<size_t>(from);
      for (int i = ends[b]; i < ends[b + 1]; ++i) merging.extend();
      const std::vector<OpTimes>& ops = merging.times();
      for (size_t i = 0; i < groupings[b].size(); ++i) {
        Grouping next = groupings[b][i];
        for (const OpTimes& op : ops) next.progress.add(op);
        next.lateness_s = next.progress.lateness_s();
        ++next.groups;
        next.before = {from, i};
        all.push_back(std::move(next));
      }
    }
    const bool drop = all.size() > kAll && to < count;
    groupings[static_cast<size_t>(to)] = drop ? leading(std::move(all)) : std::move(all);
  }
  const std::vector<Grouping>& whole = groupings.back();
  const Grouping* best =
      &*std::min_element(whole.begin(), whole.end(), [](const Grouping& a, const Grouping& b) {
        return std::pair(a.lateness_s, a.groups) < std::pair(b.lateness_s, b.groups);
      });
  std::vector<int> chosen;
  for (int to = count; to > 0;) {
    chosen.push_back(ends[static_cast<size_t>(to)]);
    const auto [from, i] = best->before;
    best = &groupings[static_cast<size_t>(from)][i];
    to = from;
  }
  return merging.plan("mergecomp", {chosen.rbegin(), chosen.rend()});
}

}  // namespace usbyte
