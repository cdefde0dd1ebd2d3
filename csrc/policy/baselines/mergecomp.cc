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
  int groups = 0;
  std::pair<int, size_t> before{0, 0};  // boundary and grouping that it adds a group to
};

// What a grouping is judged by. There are very many, so their progress is not kept.
struct Rating {
  double lateness_s, channel_s, thread_s, decoded_s;
  int groups;
  std::pair<int, size_t> before;

  Rating(const CodedProgress& progress, int group_count, std::pair<int, size_t> last)
      : lateness_s(progress.lateness_s()),
        channel_s(progress.channel_s()),
        thread_s(progress.thread_s()),
        decoded_s(progress.decoded_s()),
        groups(group_count),
        before(last) {}

  // Nothing of it is after the other's.
  bool leads(const Rating& other) const {
    return channel_s <= other.channel_s && thread_s <= other.thread_s &&
           lateness_s <= other.lateness_s && decoded_s <= other.decoded_s;
  }
};

// Those that no other leads; if there are too many, some from the least late to the latest.
std::vector<Rating> leading(std::vector<Rating> all) {
  std::ranges::stable_sort(all, {},
                           [](const Rating& r) { return std::pair(r.lateness_s, r.channel_s); });
  std::vector<Rating> front;
  for (const Rating& r : all) {
    const bool behind =
        std::ranges::any_of(front, [&](const Rating& other) { return other.leads(r); });
    if (!behind) front.push_back(r);
  }
  if (front.size() <= kLeading) return front;
  std::vector<Rating> out;
  for (size_t i = 0; i < kLeading; ++i) {
    out.push_back(front[i * (front.size() - 1) / (kLeading - 1)]);
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
  std::vector<std::vector<OpTimes>> ops(ends.size());  // of the group from a boundary on
  const auto add_group = [&](CodedProgress& progress, int from) {
    for (const OpTimes& op : ops[static_cast<size_t>(from)]) progress.add(op);
  };
  CodedProgress progress;  // one for all, which keeps its memory
  for (int to = 1; to <= count; ++to) {
    std::vector<Rating> all;
    merging.start(ends[static_cast<size_t>(to)]);
    for (int from = to - 1; from >= 0; --from) {
      const size_t b = static_cast<size_t>(from);
      for (int i = ends[b]; i < ends[b + 1]; ++i) merging.extend();
      ops[b] = merging.times();
      for (size_t i = 0; i < groupings[b].size(); ++i) {
        progress = groupings[b][i].progress;
        add_group(progress, from);
        all.emplace_back(progress, groupings[b][i].groups + 1, std::pair(from, i));
      }
    }
    if (to == count) {
      all = {*std::ranges::min_element(
          all, {}, [](const Rating& r) { return std::pair(r.lateness_s, r.groups); })};
    } else if (all.size() > kAll) {
      all = leading(std::move(all));
    }
    for (const Rating& r : all) {
      const auto [from, i] = r.before;
      Grouping next{groupings[static_cast<size_t>(from)][i].progress, r.groups, r.before};
      add_group(next.progress, from);
      groupings[static_cast<size_t>(to)].push_back(std::move(next));
    }
  }
  const Grouping* best = &groupings.back().front();
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
