// SPDX-License-Identifier: Apache-2.0
#include "local_search.h"

#include <algorithm>

namespace usbyte {
namespace {

constexpr double kTolerance = 1e-7;  // of the iteration; smaller gains are rounding
constexpr size_t kMostKicks = 3;
constexpr int kMostFruitless = 60;  // random changes in a row; small jobs are exhausted by then
constexpr size_t kParts = 16;
constexpr int64_t kFixed = 20;  // what scoring takes beyond each tensor and op
constexpr int64_t kLeastScores = 600;

int64_t numel(const std::vector<Block>& blocks) {
  int64_t sum = 0;
  for (Block b : blocks) sum += b.numel();
  return sum;
}

// Takes the first `count` elements of `blocks` away and returns them.
std::vector<Block> take(std::vector<Block>& blocks, int64_t count) {
  std::vector<Block> taken;
  while (count > 0) {
    Block& first = blocks.front();
    const int64_t n = std::min(count, first.numel());
    taken.push_back({first.begin, first.begin + n});
    first.begin += n;
    count -= n;
    if (first.numel() == 0) blocks.erase(blocks.begin());
  }
  return taken;
}

// The element nearest to `at` in (low, high) where a tensor begins; `at` itself if none is as near
// as a quarter of the range.
int64_t snap(const Plan& layout, int64_t at, int64_t low, int64_t high) {
  const auto& tensors = layout.tensors();
  auto it = std::lower_bound(tensors.begin(), tensors.end(), at,
                             [](const TensorSpec& t, int64_t e) { return t.offset < e; });
  int64_t best = at, distance = (high - low) / 4;
  for (int back = 0; back < 2; ++back) {
    if (it != tensors.end() && it->offset > low && it->offset < high &&
        std::abs(it->offset - at) <= distance) {
      best = it->offset;
      distance = std::abs(best - at);
    }
    if (it == tensors.begin()) break;
    --it;
  }
  return best;
}

}  // namespace

bool LocalSearch::Score::better_than(const Score& other, double slack_s) const {
  if (lateness_s < other.lateness_s - slack_s) return true;
  return lateness_s <= other.lateness_s + slack_s / 100 && end_s < other.end_s - slack_s;
}

LocalSearch::Score LocalSearch::score(const Draft& draft) {
  const int64_t before = simulator_->ops();
  const double lateness = simulator_->lateness_s(build(draft, *layout_, costs_));
  left_ -= std::ssize(layout_->tensors()) + simulator_->ops() - before + kFixed;
  return {lateness, simulator_->end_s()};
}

void LocalSearch::start(const Draft& draft) {
  left_ = std::max(
      work_, kLeastScores * (std::ssize(layout_->tensors()) + std::ssize(draft.ops) + kFixed));
}

double LocalSearch::improve(Draft& draft) {
  start(draft);
  best_ = score(draft);
  slack_s_ = kTolerance * best_.end_s;
  hill_climb(draft);
  std::mt19937 random;
  int fruitless = 0;
  while (left_ > 0 && best_.lateness_s > enough_s_ + slack_s_ &&
         (draft.ops.size() > 1 || may_mix_) && fruitless < kMostFruitless) {
    const Score before = best_;
    Draft changed = draft;
    for (size_t kicks = 1 + random() % kMostKicks; kicks > 0; --kicks) perturb(changed, random);
    best_ = score(changed);
    hill_climb(changed);
    if (best_.better_than(before, slack_s_)) {
      draft = std::move(changed);
      fruitless = 0;
    } else {
      best_ = before;
      ++fruitless;
    }
  }
  return best_.lateness_s;
}

void LocalSearch::simplify(Draft& draft, double worse_s) {
  start(draft);
  const double limit_s = score(draft).lateness_s + worse_s;
  for (size_t i = 0; i + 1 < draft.ops.size() && left_ > 0;) {
    Draft changed = draft;
    const bool shot = one_shot(draft, i) || one_shot(draft, i + 1);
    if (join_next(changed, i) && shot == one_shot(changed, i) &&
        score(changed).lateness_s <= limit_s) {
      draft = std::move(changed);
    } else {
      ++i;
    }
  }
}

bool LocalSearch::join_next(Draft& draft, size_t op) const {
  const auto next = draft.ops.begin() + static_cast<std::ptrdiff_t>(op) + 1;
  DraftOp& first = draft.ops[op];
  if (first.split != next->split) return false;
  if (layout_->dtype(first.blocks.front()) != layout_->dtype(next->blocks.front())) return false;
  for (Block b : next->blocks) add(first.blocks, b, *layout_);
  draft.ops.erase(next);
  return true;
}

bool LocalSearch::one_shot(const Draft& draft, size_t op) const {
  const auto& [blocks, split] = draft.ops[op];
  return !split && costs_.one_shot.takes(Collective::all_reduce, layout_->bytes({{}, blocks}));
}

// Elements of the whole tensors at the beginning of `op` that go in one shot.
int64_t LocalSearch::head(const Draft& draft, size_t op) const {
  const std::vector<Block>& blocks = draft.ops[op].blocks;
  const int64_t most =
      costs_.one_shot.most_bytes / static_cast<int64_t>(itemsize(layout_->dtype(blocks.front())));
  int64_t whole = 0, before = 0;
  for (Block b : blocks) {
    for (int t : layout_->tensors_of({{}, {b}})) {
      const int64_t end = std::min(layout_->tensors()[static_cast<size_t>(t)].end(), b.end);
      if (before + end - b.begin > most) return whole;
      whole = before + end - b.begin;
    }
    before += b.numel();
  }
  return whole;
}

void LocalSearch::perturb(Draft& draft, std::mt19937& random) const {
  const auto any = [&](size_t count) { return static_cast<size_t>(random()) % count; };
  const size_t i = any(draft.ops.size());
  if (may_mix_ && any(4) == 0) draft.ops[i].split = !draft.ops[i].split;
  DraftOp op = std::move(draft.ops[i]);
  draft.ops.erase(draft.ops.begin() + static_cast<std::ptrdiff_t>(i));
  const auto insert = [&](DraftOp inserted, size_t at) {
    draft.ops.insert(draft.ops.begin() + static_cast<std::ptrdiff_t>(at), std::move(inserted));
  };
  const int64_t all = numel(op.blocks);
  if (all > 1 && any(2) == 0) {
    const double part = static_cast<double>(1 + any(kParts - 1)) / kParts;
    const int64_t count =
        std::clamp<int64_t>(static_cast<int64_t>(part * static_cast<double>(all)), 1, all - 1);
    insert({take(op.blocks, count), op.split}, i);
    insert(std::move(op), i + 1 + any(draft.ops.size() - i));
  } else {
    insert(std::move(op), any(draft.ops.size() + 1));
  }
}

void LocalSearch::hill_climb(Draft& draft) {
  bool found = true;
  while (found && left_ > 0) {
    found = false;
    for (auto step : {&LocalSearch::join, &LocalSearch::shift, &LocalSearch::cut,
                      &LocalSearch::move, &LocalSearch::change_kind}) {
      while (left_ > 0 && (this->*step)(draft)) found = true;
    }
  }
}

bool LocalSearch::accept(Draft& draft, Draft changed) {
  if (left_ <= 0) return false;
  const Score now = score(changed);
  if (!now.better_than(best_, slack_s_)) return false;
  best_ = now;
  draft = std::move(changed);
  return true;
}

// Each change below goes once over the draft and keeps what improves it.

bool LocalSearch::join(Draft& draft) {
  bool found = false;
  for (size_t i = 0; i + 1 < draft.ops.size() && left_ > 0;) {
    Draft changed = draft;
    if (join_next(changed, i) && accept(draft, std::move(changed))) {
      found = true;
    } else {
      ++i;
    }
  }
  return found;
}

bool LocalSearch::change_kind(Draft& draft) {
  bool found = false;
  for (size_t i = 0; may_mix_ && i < draft.ops.size() && left_ > 0; ++i) {
    Draft changed = draft;
    changed.ops[i].split = !changed.ops[i].split;
    found |= accept(draft, std::move(changed));
  }
  return found;
}

bool LocalSearch::move(Draft& draft) {
  bool found = false;
  const auto count = static_cast<std::ptrdiff_t>(draft.ops.size());
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    for (std::ptrdiff_t by : {-1, 1, -2, 2, -4, 4, -8, 8}) {
      const std::ptrdiff_t to = i + by;
      if (to < 0 || to >= count || left_ <= 0) continue;
      Draft changed = draft;
      const auto from = changed.ops.begin() + i;
      if (by > 0) {
        std::rotate(from, from + 1, changed.ops.begin() + to + 1);
      } else {
        std::rotate(changed.ops.begin() + to, from, from + 1);
      }
      found |= accept(draft, std::move(changed));
    }
  }
  return found;
}

bool LocalSearch::cut(Draft& draft) {
  bool found = false;
  for (size_t i = 0; i < draft.ops.size(); ++i) {
    const int64_t all = numel(draft.ops[i].blocks);
    for (double part : {0.0, 0.5, 0.25, 0.75}) {
      if (left_ <= 0) return found;
      int64_t count = static_cast<int64_t>(part * static_cast<double>(all));
      if (part == 0) {
        count = draft.ops[i].split ? 0 : head(draft, i);
      } else if (draft.ops[i].blocks.size() == 1) {
        const Block b = draft.ops[i].blocks.front();
        count = snap(*layout_, b.begin + count, b.begin, b.end) - b.begin;
      }
      if (count <= 0 || count >= all) continue;
      Draft changed = draft;
      const DraftOp first{take(changed.ops[i].blocks, count), changed.ops[i].split};
      const auto at = changed.ops.begin() + static_cast<std::ptrdiff_t>(i);
      Draft late_first = changed;
      changed.ops.insert(at, first);
      if (accept(draft, std::move(changed))) {
        found = true;
        break;
      }
      // The half farther from the input later than all others.
      late_first.ops.push_back(std::move(late_first.ops[i]));
      late_first.ops[i] = first;
      if (accept(draft, std::move(late_first))) {
        found = true;
        break;
      }
    }
  }
  return found;
}

bool LocalSearch::shift(Draft& draft) {
  struct OpBlock {
    Block block;
    size_t op;
  };
  bool found = false;
  bool again = true;
  for (size_t start = 0; again && left_ > 0;) {
    std::vector<OpBlock> pieces;
    for (size_t i = 0; i < draft.ops.size(); ++i) {
      for (Block b : draft.ops[i].blocks) pieces.push_back({b, i});
    }
    std::sort(pieces.begin(), pieces.end(),
              [](const OpBlock& a, const OpBlock& b) { return a.block < b.block; });
    again = false;
    for (size_t i = start; i + 1 < pieces.size() && !again; ++i) {
      const OpBlock &left = pieces[i], &right = pieces[i + 1];
      if (left.op == right.op || layout_->dtype(left.block) != layout_->dtype(right.block))
        continue;
      for (double part : {0.5, -0.5, 0.125, -0.125, 0.03, -0.03}) {
        if (left_ <= 0) return found;
        const Block from = part > 0 ? right.block : left.block;
        const int64_t n = static_cast<int64_t>(part * static_cast<double>(from.numel()));
        const int64_t edge = snap(*layout_, left.block.end + n, left.block.begin, right.block.end);
        if (edge <= left.block.begin || edge >= right.block.end || edge == left.block.end) continue;
        Draft changed = draft;
        for (Block& b : changed.ops[left.op].blocks) {
          if (b == left.block) b.end = edge;
        }
        for (Block& b : changed.ops[right.op].blocks) {
          if (b == right.block) b.begin = edge;
        }
        if (accept(draft, std::move(changed))) {
          found = again = true;
          start = i;
          break;
        }
      }
    }
  }
  return found;
}

}  // namespace usbyte
