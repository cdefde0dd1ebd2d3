// SPDX-License-Identifier: Apache-2.0
#include "batching.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace usbyte {
namespace {

// Least values of ranges, of numbers that come one after the other from the last place to the
// first. A row for each power of two: the least of so many from a place on.
class RangeMin {
 public:
  explicit RangeMin(size_t size)
      : size_(size), rows_(static_cast<size_t>(std::bit_width(size))), least_(rows_ * size) {}

  void set(size_t place, double value) {
    least_[place] = value;
    for (size_t p = 1; p < rows_ && place + (size_t{1} << p) <= size_; ++p) {
      const size_t half = size_t{1} << (p - 1);
      least_[p * size_ + place] = std::min(of(p - 1, place), of(p - 1, place + half));
    }
  }

  // Of the places begin <= p < end; there is one.
  double least(size_t begin, size_t end) const {
    const auto p = static_cast<size_t>(std::bit_width(end - begin) - 1);
    return std::min(of(p, begin), of(p, end - (size_t{1} << p)));
  }

  // Behind the last place in begin <= p < end whose value `fits`, as do all smaller ones; `begin`
  // if there is none.
  template <class Fits>
  size_t last(size_t begin, size_t end, Fits fits) const {
    for (size_t p = rows_; p-- > 0;) {
      const size_t count = size_t{1} << p;
      if (end - begin >= count && !fits(of(p, end - count))) end -= count;
    }
    return end;
  }

 private:
  double of(size_t row, size_t place) const { return least_[row * size_ + place]; }

  size_t size_, rows_;
  std::vector<double> least_;
};

// The first of begin <= k < end for which `is` does not hold, as for none behind it; else `end`.
// Looks near `begin` first, where it mostly is.
template <class Is>
size_t first_not(size_t begin, size_t end, Is is) {
  for (size_t stride = 1; begin + stride < end; stride *= 2) {
    if (!is(begin + stride)) {
      end = begin + stride;
      break;
    }
    begin += stride;
  }
  while (begin < end) {
    const size_t middle = begin + (end - begin) / 2;
    if (is(middle)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace

Batching batch_exactly(std::span<const double> length_s, std::span<const double> due_s,
                       double startup_s, double least_s) {
  const size_t n = length_s.size();
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<double> until(n + 1, 0);  // lengths of all jobs before
  for (size_t k = 0; k < n; ++k) until[k + 1] = until[k] + length_s[k];
  // best[j]: least lateness of jobs j, j + 1, ... if the channel is free at time 0; falls with j.
  std::vector<double> best(n + 1, -kNever);
  std::vector<size_t> next(n + 1, n);
  RangeMin rest(n + 1);  // best[k] + until[k]
  rest.set(n, -kNever);
  for (size_t j = n; j-- > 0;) {
    const double begin_s = startup_s - until[j];
    // With k as the first job behind the first batch, that takes busy(k), but at least `least_s`.
    // It is late by as much less the due date, and what follows by best[k] more.
    const auto busy = [&](size_t k) { return begin_s + until[k]; };
    const auto late = [&](size_t k) { return busy(k) - due_s[j]; };
    const size_t longer = first_not(j + 1, n + 1, [&](size_t k) { return busy(k) <= least_s; });
    best[j] = kNever;
    if (longer > j + 1) {  // of those that take `least_s`, the one that leaves least behind
      next[j] = longer - 1;
      best[j] = std::max(best[longer - 1] + least_s, least_s - due_s[j]);
    }
    // The least lateness of what follows falls as more batches may be taken, theirs grows.
    const size_t turn = first_not(
        longer, n + 1, [&](size_t k) { return begin_s + rest.least(longer, k + 1) > late(k); });
    if (turn <= n) best[j] = std::min(best[j], late(turn));
    if (turn > longer) best[j] = std::min(best[j], begin_s + rest.least(longer, turn));
    // Among equals the longest batch: fewer startups.
    const size_t end = first_not(longer, n + 1, [&](size_t k) { return late(k) <= best[j]; });
    const size_t last = rest.last(longer, end, [&](double r) { return begin_s + r <= best[j]; });
    if (last > longer) next[j] = last - 1;
    rest.set(j, best[j] + until[j]);
  }
  Batching out{n ? best[0] : 0, {}};
  for (size_t j = 0; j < n; j = next[j]) out.begins.push_back(static_cast<int>(j));
  return out;
}

}  // namespace usbyte
