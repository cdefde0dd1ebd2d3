// SPDX-License-Identifier: Apache-2.0
#include "channel.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// Of the rounds of an op that has been alone since it was launched.
constexpr double kAlone = -1;

template <typename T>
void push(std::vector<T>& heap, T value) {
  heap.push_back(value);
  std::push_heap(heap.begin(), heap.end(), std::greater<>());
}

template <typename T>
T pop(std::vector<T>& heap) {
  std::pop_heap(heap.begin(), heap.end(), std::greater<>());
  const T top = heap.back();
  heap.pop_back();
  return top;
}

}  // namespace

void Channel::launch(int op, Collective kind, int64_t bytes, double now_s, bool packed) {
  go_on_to(now_s);
  const AlphaBeta cost = network_->cost(kind, static_cast<int>(running() + waiting_.size()) + 1);
  const double work_s = cost.beta_s_per_byte * static_cast<double>(bytes);
  const double pack_s = packed && kind == Collective::all_reduce
                            ? network_->pack_s_per_byte * static_cast<double>(bytes)
                            : 0;
  if (!std::isfinite(now_s + cost.alpha_s + pack_s + work_s)) {
    throw UsageError("network: an op of " + std::to_string(bytes) + " bytes would never end");
  }
  if (network_->one_shot.takes(kind, bytes)) {
    shoot(op, work_s * std::max(network_->ranks / 2.0, 1.0));
    return;
  }
  wait_for_start(
      {shots_sent_s_, op, cost.latency_s() + pack_s, cost.alpha_s + pack_s, work_s, 0, 0});
}

void Channel::launch_for(int op, double latency_s, double work_s, double now_s) {
  go_on_to(now_s);
  wait_for_start({shots_sent_s_, op, latency_s, latency_s, work_s, 0, 0});
}

void Channel::wait_for_start(Flight op) {
  waiting_.push_back(op);
  if (starts_s() <= now_s_) start_next();
}

double Channel::next_s() const {
  return std::min({shot_ends_s(), starts_s(), flows_s(), ends_s(), lingers_s(), rounds_end_s()});
}

int Channel::advance() {
  if (!shots_.empty() && shot_ends_s() <= next_s()) {
    go_on_to(shot_ends_s());
    const int op = shots_.front().second;
    shots_.pop_front();
    return op;
  }
  const double flows = flows_s(), ends = ends_s(), lingers = lingers_s();
  const double rounds_end = rounds_end_s();
  if (const double starts = starts_s(); starts < std::min({rounds_end, flows, ends, lingers})) {
    go_on_to(starts);
    start_next();
    return -1;
  }
  if (rounds_end <= std::min({flows, ends, lingers})) {
    go_on_to(rounds_end);
    const auto [rounds, op] = pop(held_);
    rounds_ = std::max(rounds_, rounds);
    time_rounds();
    return complete(op);
  }
  if (lingers <= std::min(flows, ends)) {
    go_on_to(lingers);
    return complete_or_hold(pop(lingering_));
  }
  if (flows < ends) {
    Flight first = pop(starting_);
    go_on_to(flows);
    first.until_s = share_s_ + first.work_s;
    push(flowing_, first);
    return -1;
  }
  go_on_to(ends);
  Flight through = pop(flowing_);
  share_s_ = flowing_.empty() ? 0 : through.until_s;
  if (through.started_up_s <= now_s_) return complete_or_hold(through);
  through.until_s = through.started_up_s;
  push(lingering_, through);
  time_rounds();
  return -1;
}

double Channel::shot_ends_s() const { return shots_.empty() ? kNever : shots_.front().first; }

double Channel::starts_s() const {
  const bool full =
      network_->concurrent > 0 && running() >= static_cast<size_t>(network_->concurrent);
  return waiting_.empty() || full ? kNever : std::max(waiting_.front().until_s, now_s_);
}

double Channel::flows_s() const { return starting_.empty() ? kNever : starting_.front().until_s; }

double Channel::ends_s() const {
  if (flowing_.empty()) return kNever;
  return std::max(now_s_, shot_until_s_) +
         (flowing_.front().until_s - share_s_) * static_cast<double>(flowing_.size());
}

double Channel::lingers_s() const {
  return lingering_.empty() ? kNever : lingering_.front().until_s;
}

double Channel::rounds_end_s() const {
  if (held_.empty()) return kNever;
  return now_s_ + std::max(held_.front().first - rounds_, 0.0) * all_rounds_s_;
}

void Channel::go_on_to(double time_s) {
  const double passed_s = time_s - now_s_;
  const double flowed_s = std::max(time_s - std::max(now_s_, shot_until_s_), 0.0);
  if (!flowing_.empty()) share_s_ += flowed_s / static_cast<double>(flowing_.size());
  if (all_rounds_s_ > 0) rounds_ += passed_s / all_rounds_s_;
  now_s_ = time_s;
}

void Channel::shoot(int op, double work_s) {
  const OneShot& cost = network_->one_shot;
  shot_until_s_ = std::max(shot_until_s_, now_s_) + work_s;
  shots_sent_s_ = std::max(shots_sent_s_, now_s_) + cost.gap_s;
  const bool busy = running() + waiting_.size() > 0;
  const double latency_s = busy ? std::max(cost.busy_latency_s, cost.latency_s) : cost.latency_s;
  last_shot_s_ =
      std::max(now_s_ + std::max(latency_s, work_s), last_shot_s_ + std::max(cost.gap_s, work_s));
  shots_.emplace_back(last_shot_s_, op);
}

void Channel::start_next() {
  Flight op = waiting_.front();
  waiting_.pop_front();
  op.until_s = now_s_ + op.latency_s;
  op.started_up_s = now_s_ + op.alpha_s;
  const bool alone = in_progress() == 0;
  if (alone && held_.empty()) rounds_ = 0;
  op.rounds_until = alone ? kAlone : rounds_ + 1;
  end_loneliness();
  push(starting_, op);
  time_rounds();
}

void Channel::end_loneliness() {
  if (in_progress() != 1) return;
  for (std::vector<Flight>* flights : {&starting_, &flowing_, &lingering_}) {
    for (Flight& op : *flights) {
      const double left_s = op.started_up_s - now_s_;
      if (op.rounds_until != kAlone || (flights == &flowing_ && left_s <= 0)) continue;
      op.rounds_until = left_s > 0 ? rounds_ + left_s / op.alpha_s : rounds_;
    }
  }
}

void Channel::time_rounds() {
  const double most_s = network_->busy_alpha_s;
  if (most_s == 0) return;
  all_rounds_s_ = 0;
  if (running() == 1) return;
  double largest_s = 0;
  for (const std::vector<Flight>* flights : {&starting_, &flowing_}) {
    for (const Flight& op : *flights) {
      if (largest_s >= most_s) break;
      largest_s = std::max(largest_s, op.work_s);
    }
  }
  all_rounds_s_ = std::min(largest_s, most_s);
}

// An op whose startup and bytes are through.
int Channel::complete_or_hold(const Flight& through) {
  const bool is_held = network_->busy_alpha_s > 0 && through.rounds_until > rounds_;
  if (is_held) push(held_, {through.rounds_until, through.op});
  time_rounds();
  return is_held ? -1 : complete(through.op);
}

int Channel::complete(int op) {
  if (starts_s() <= now_s_) start_next();
  return op;
}

}  // namespace usbyte
