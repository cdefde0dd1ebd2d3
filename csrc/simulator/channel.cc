#include "usbyte/channel.h"

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

void Channel::launch(int op, Collective kind, int64_t bytes, int in_flight, double now_s) {
  go_on_to(now_s);
  const AlphaBeta cost = network_->cost(kind, in_flight);
  const double work_s = cost.beta_s_per_byte * static_cast<double>(bytes);
  if (!std::isfinite(now_s + cost.alpha_s + work_s)) {
    throw UsageError("network: an op of " + std::to_string(bytes) + " bytes would never end");
  }
  const Starting launched{0, op, cost.alpha_s, work_s, 0};
  const size_t running = starting_.size() + flowing_.size() + held_.size();
  if (network_->concurrent > 0 && running >= static_cast<size_t>(network_->concurrent)) {
    waiting_.push_back(launched);
  } else {
    start(launched);
  }
}

double Channel::next_s() const { return std::min({flows_s(), ends_s(), rounds_end_s()}); }

int Channel::advance() {
  const double flows = flows_s(), ends = ends_s(), rounds_end = rounds_end_s();
  if (rounds_end <= std::min(flows, ends)) {
    go_on_to(rounds_end);
    const auto [rounds, op] = pop(held_);
    rounds_ = std::max(rounds_, rounds);
    time_rounds();
    return complete(op);
  }
  if (flows < ends) {
    const Starting first = pop(starting_);
    go_on_to(flows);
    push(flowing_, {share_s_ + first.work_s, first.op, first.work_s, first.rounds_until});
    return -1;
  }
  go_on_to(ends);
  const Flow through = pop(flowing_);
  share_s_ = flowing_.empty() ? 0 : through.until_s;
  const bool is_held = network_->busy_alpha_s > 0 && through.rounds_until > rounds_;
  if (is_held) push(held_, {through.rounds_until, through.op});
  time_rounds();
  return is_held ? -1 : complete(through.op);
}

double Channel::flows_s() const { return starting_.empty() ? kNever : starting_.front().until_s; }

double Channel::ends_s() const {
  if (flowing_.empty()) return kNever;
  return now_s_ + (flowing_.front().until_s - share_s_) * static_cast<double>(flowing_.size());
}

double Channel::rounds_end_s() const {
  if (held_.empty()) return kNever;
  return now_s_ + std::max(held_.front().first - rounds_, 0.0) * all_rounds_s_;
}

void Channel::go_on_to(double time_s) {
  const double passed_s = time_s - now_s_;
  if (!flowing_.empty()) share_s_ += passed_s / static_cast<double>(flowing_.size());
  if (all_rounds_s_ > 0) rounds_ += passed_s / all_rounds_s_;
  now_s_ = time_s;
}

void Channel::start(Starting op) {
  op.until_s = now_s_ + op.startup_s;
  if (is_idle() && held_.empty()) rounds_ = 0;
  op.rounds_until = is_idle() ? kAlone : rounds_ + 1;
  end_loneliness();
  push(starting_, op);
  time_rounds();
}

void Channel::end_loneliness() {
  if (starting_.size() + flowing_.size() != 1) return;
  for (Starting& op : starting_) {
    if (op.rounds_until != kAlone) continue;
    const double left_s = op.until_s - now_s_;
    op.rounds_until = left_s > 0 ? rounds_ + left_s / op.startup_s : rounds_;
  }
}

void Channel::time_rounds() {
  const double most_s = network_->busy_alpha_s;
  if (most_s == 0) return;
  all_rounds_s_ = 0;
  if (starting_.size() + flowing_.size() + held_.size() == 1) return;
  double largest_s = 0;
  for (const Starting& op : starting_) largest_s = std::max(largest_s, op.work_s);
  for (const Flow& op : flowing_) {
    if (largest_s >= most_s) break;
    largest_s = std::max(largest_s, op.work_s);
  }
  all_rounds_s_ = std::min(largest_s, most_s);
}

int Channel::complete(int op) {
  if (!waiting_.empty()) {
    start(waiting_.front());
    waiting_.pop_front();
  }
  return op;
}

}  // namespace usbyte
