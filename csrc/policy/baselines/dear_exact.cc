// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "dear.h"
#include "usbyte/simulator.h"

namespace usbyte {
namespace {

// The largest of any run of values, in constant time.
class RunMax {
 public:
  explicit RunMax(std::vector<double> values) {
    levels_.push_back(std::move(values));
    for (size_t width = 1; 2 * width <= levels_.front().size(); width *= 2) {
      const std::vector<double>& half = levels_.back();
      std::vector<double> level(half.size() - width);
      for (size_t i = 0; i < level.size(); ++i) level[i] = std::max(half[i], half[i + width]);
      levels_.push_back(std::move(level));
    }
  }
  double operator()(size_t begin, size_t end) const {
    const size_t k = static_cast<size_t>(std::bit_width(end - begin)) - 1;
    return std::max(levels_[k][begin], levels_[k][end - (size_t{1} << k)]);
  }

 private:
  std::vector<std::vector<double>> levels_;
};

// DeAR's groups at any fusion size and what the simulator would say of their plan, without making
// either. Tensors are numbered from the end of the flat buffer, as groups are cut.
class Groupings {
 public:
  Groupings(const Profile& p, const NetworkModel& network, const PolicyOptions& options)
      : sharded_(options.sharded),
        backward_end_s_(p.backward_end_s()),
        shard_update_s_(p.update_s / network.ranks),
        scatter_(network.cost(Collective::reduce_scatter, 1)),
        gather_(network.cost(Collective::all_gather, 1)),
        end_of_dtype_(p.tensors.size()),
        sum_{0},
        ready_s_({p.ready_s.rbegin(), p.ready_s.rend()}),
        earliness_(negated(p.need_s)),
        urgency_(negated(Simulator(p, network, options.overlap, options.sharded).due_s())) {
    const size_t n = p.tensors.size();
    for (size_t i = 0; i < n; ++i) {
      const TensorSpec& t = p.tensors[n - 1 - i];
      sum_.push_back(sum_.back() + t.numel * itemsize(t.dtype));
    }
    for (size_t i = n; i-- > 0;) {
      const bool last = i + 1 == n || p.tensors[n - 1 - i].dtype != p.tensors[n - 2 - i].dtype;
      end_of_dtype_[i] = last ? i + 1 : end_of_dtype_[i + 1];
    }
  }

  int64_t bytes() const { return sum_.back(); }
  size_t groups() const { return groups_.size(); }

  // Cuts groups of at most `fusion_bytes`; returns the next larger size at which they change, the
  // largest number if they never do.
  int64_t cut(int64_t fusion_bytes) {
    groups_.clear();
    int64_t next = std::numeric_limits<int64_t>::max();
    for (size_t begin = 0; begin < end_of_dtype_.size();) {
      const size_t end = end_of_group(begin, fusion_bytes);
      if (end < end_of_dtype_[begin]) next = std::min(next, sum_[end + 1] - sum_[begin]);
      groups_.push_back({begin, sum_[end] - sum_[begin], ready_s_(begin, end),
                         -earliness_(begin, end), -urgency_(begin, end)});
      begin = end;
    }
    return next;
  }

  // How far the groups that were cut last prolong an iteration.
  double delay_s() {
    double channel_s = 0, delay_s = 0;
    sort([](const Group& g) { return std::pair(g.ready_s, g.begin); });
    for (const Group& g : groups_) {
      channel_s = std::max(channel_s, g.ready_s) + scatter_.time_s(g.bytes);
    }
    if (sharded_) {  // the update waits for all scatters, the gathers for the update
      delay_s = std::max(channel_s - backward_end_s_, 0.0);
      channel_s = backward_end_s_ + delay_s + shard_update_s_;
    }
    std::reverse(groups_.begin(), groups_.end());  // as a rule the order of need
    sort([](const Group& g) { return std::pair(g.need_s, ~g.begin); });
    for (const Group& g : groups_) {
      channel_s += gather_.time_s(g.bytes);
      delay_s = std::max(delay_s, channel_s - g.due_s);
    }
    return delay_s;
  }

 private:
  struct Group {
    size_t begin;
    int64_t bytes;
    double ready_s, need_s, due_s;
  };

  static RunMax negated(std::vector<double> values) {
    std::reverse(values.begin(), values.end());
    std::transform(values.begin(), values.end(), values.begin(), std::negate<>());
    return RunMax(std::move(values));
  }
  template <typename Key>
  void sort(Key key) {
    const auto less = [&](const Group& a, const Group& b) { return key(a) < key(b); };
    if (!std::is_sorted(groups_.begin(), groups_.end(), less)) {
      std::sort(groups_.begin(), groups_.end(), less);
    }
  }
  // Doubling steps, as most groups are short.
  size_t end_of_group(size_t begin, int64_t fusion_bytes) const {
    const size_t limit = end_of_dtype_[begin];
    size_t step = 1;
    while (begin + step < limit && sum_[begin + step] - sum_[begin] <= fusion_bytes) step *= 2;
    const auto low = sum_.begin() + static_cast<std::ptrdiff_t>(begin + step / 2 + 1);
    const auto high = sum_.begin() + static_cast<std::ptrdiff_t>(std::min(begin + step, limit) + 1);
    const auto over = std::upper_bound(
        low, high, fusion_bytes, [&](int64_t size, int64_t s) { return size < s - sum_[begin]; });
    return std::max(static_cast<size_t>(over - sum_.begin()) - 1, begin + 1);
  }

  bool sharded_;
  double backward_end_s_, shard_update_s_;
  AlphaBeta scatter_, gather_;
  std::vector<size_t> end_of_dtype_;  // by tensor: where the run of its dtype ends
  std::vector<int64_t> sum_;          // bytes of the first i tensors
  RunMax ready_s_, earliness_, urgency_;
  std::vector<Group> groups_;
};

}  // namespace

Plan dear_exact(const Profile& profile, const NetworkModel& network, const PolicyOptions& options) {
  // All sizes cost about L^2 log L groups; beyond some 4,000 tensors only the most promising
  // of them are tried.
  constexpr size_t kGroups = 50'000'000;
  Groupings groupings(profile, network, options);
  size_t groups = 0;
  int64_t best = options.fusion_bytes;
  double least_s = std::numeric_limits<double>::infinity();
  int64_t next = 0;  // size at which the groups that were tried last change
  const auto attempt = [&](int64_t fusion_bytes) {
    next = groupings.cut(fusion_bytes);
    groups += groupings.groups();
    const double delay_s = groupings.delay_s();
    if (delay_s < least_s) {
      least_s = delay_s;
      best = fusion_bytes;
    }
    return delay_s;
  };
  attempt(best);  // first, so that it stays where nothing is better

  struct SizeRange {
    double least_s;  // at its ends
    int64_t begin, end;
  };
  std::vector<SizeRange> ranges;
  int64_t begin = 0;
  for (double begin_s = attempt(0); next <= groupings.bytes();) {
    const int64_t end = std::max(next, begin + begin / 8);
    const double end_s = attempt(end);
    ranges.push_back({std::min(begin_s, end_s), begin, end});
    begin = end;
    begin_s = end_s;
  }
  std::sort(ranges.begin(), ranges.end(), [](const SizeRange& a, const SizeRange& b) {
    return std::pair(a.least_s, a.begin) < std::pair(b.least_s, b.begin);
  });
  for (const SizeRange& range : ranges) {
    next = groupings.cut(range.begin);
    while (next < range.end && groups < kGroups && least_s > 0) attempt(next);
  }
  return dear_plan("dear_exact", profile, fused_groups(profile, best));
}

}  // namespace usbyte
