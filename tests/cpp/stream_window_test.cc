// SPDX-License-Identifier: Apache-2.0
#include "cuda/communicators/stream_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "ranks.h"

namespace usbyte {
namespace {

using test::Random;

struct Launch {
  int64_t bytes, window_bytes;
  bool fence;
};

/// Follows placements as a device would, by what is over for certain when each launch begins.
class Follower {
 public:
  /// Launches that may be in flight beside this one, by number, oldest first.
  std::vector<int> follow(const StreamPlacement& placement) {
    // Streams run in order, and a launch begins no sooner than the one before it may.
    if (!over_.empty()) over_.push_back(over_.back());
    if (over_.empty()) over_.emplace_back();
    std::set<int>& over = over_.back();
    const auto wait = [&](int slot) {
      if (last_.contains(slot)) {
        const int waited = last_.at(slot);
        over.insert(waited);
        over.insert(over_[static_cast<size_t>(waited)].begin(),
                    over_[static_cast<size_t>(waited)].end());
      }
    };
    wait(placement.slot);
    for (int slot : placement.after) wait(slot);
    const int own = static_cast<int>(over_.size()) - 1;
    last_[placement.slot] = own;
    std::vector<int> out;
    for (int i = 0; i < own; ++i) {
      if (!over.contains(i)) out.push_back(i);
    }
    return out;
  }

 private:
  std::vector<std::set<int>> over_;  // by launch
  std::map<int, int> last_;          // by slot: launch
};

/// The longest run of launches before the last one that it may be in flight with, by trying each.
std::vector<int> reference(const std::vector<Launch>& launches, int oldest, int slots) {
  const int own = static_cast<int>(launches.size()) - 1;
  const Launch& launch = launches.back();
  for (int first = oldest; first < own; ++first) {
    int64_t bytes = launch.bytes;
    for (int i = first; i < own; ++i) bytes += launches[static_cast<size_t>(i)].bytes;
    const bool fits = launch.window_bytes == 0 || bytes <= launch.window_bytes;
    if (fits && !launch.fence && own - first < slots) {
      std::vector<int> out(static_cast<size_t>(own - first));
      std::iota(out.begin(), out.end(), first);
      return out;
    }
  }
  return {};
}

TEST(StreamWindow, RunsAsMuchTogetherAsTheRulesAllow) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const int slots = static_cast<int>(random(1, 5));
    StreamWindow window(slots);
    Follower follower;
    std::vector<Launch> launches;
    int oldest = 0;
    for (int i = 0; i < 40; ++i) {
      launches.push_back({random(0, 10), random.one_in(4) ? 0 : random(1, 25), random.one_in(6)});
      const Launch& launch = launches.back();
      const StreamPlacement placement =
          window.place(launch.bytes, launch.window_bytes, launch.fence);
      ASSERT_GE(placement.slot, 0);
      ASSERT_LT(placement.slot, slots);
      ASSERT_EQ(std::count(placement.after.begin(), placement.after.end(), placement.slot), 0);
      const std::vector<int> beside = follower.follow(placement);
      ASSERT_EQ(beside, reference(launches, oldest, slots)) << "launch " << i;
      oldest = beside.empty() ? i : beside.front();
    }
  }
}

TEST(StreamWindow, FencesKeepToOneSlotAndNeedNoWait) {
  StreamWindow window(3);
  for (int i = 0; i < 5; ++i) {
    const StreamPlacement placement = window.place(8, 8, true);
    EXPECT_EQ(placement.slot, 0);
    EXPECT_TRUE(placement.after.empty());
  }
}

TEST(StreamWindow, FollowsTheNewestThatItWaitsFor) {
  StreamWindow window(3);
  EXPECT_EQ(window.place(4, 0, false).slot, 0);
  EXPECT_EQ(window.place(4, 0, false).slot, 1);
  EXPECT_EQ(window.place(4, 0, false).slot, 2);
  const StreamPlacement placement = window.place(4, 8, false);
  EXPECT_EQ(placement.slot, 1);
  EXPECT_EQ(placement.after, std::vector<int>{0});
}

TEST(StreamWindow, LargerThanItsWindowGoesAlone) {
  StreamWindow window(2);
  window.place(1, 100, false);
  const StreamPlacement placement = window.place(200, 100, false);
  EXPECT_EQ(placement.slot, 0);
  EXPECT_TRUE(placement.after.empty());
}

}  // namespace
}  // namespace usbyte
