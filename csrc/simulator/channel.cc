#include "usbyte/channel.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace usbyte {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

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
  const Startup launched{cost.alpha_s, cost.beta_s_per_byte * static_cast<double>(bytes), op};
  if (network_->serial_startups && !(starting_.empty() && flowing_.empty())) {
    waiting_.push_back(launched);
  } else {
    start(launched);
  }
}

double Channel::next_s() const { return std::min(flows_s(), completes_s()); }

int Channel::advance() {
  const double flows = flows_s(), completes = completes_s();
  if (flows < completes) {
    const Startup first = pop(starting_);
    go_on_to(flows);
    started_s_ = first.until_s;
    push(flowing_, std::pair(share_s_ + first.work_s, first.op));
    return -1;
  }
  go_on_to(completes);
  const auto [share, op] = pop(flowing_);
  share_s_ = flowing_.empty() ? 0 : share;
  if (!waiting_.empty()) {
    start(waiting_.front());
    waiting_.pop_front();
  }
  return op;
}

double Channel::flows_s() const {
  if (starting_.empty()) return kNever;
  const double left = starting_.front().until_s - started_s_;
  return now_s_ + (flowing_.empty() ? left : left * network_->busy_slowdown);
}

double Channel::completes_s() const {
  if (flowing_.empty()) return kNever;
  return now_s_ + (flowing_.front().first - share_s_) * static_cast<double>(flowing_.size());
}

void Channel::go_on_to(double time_s) {
  const double passed = time_s - now_s_;
  if (flowing_.empty()) {
    started_s_ += passed;
  } else {
    started_s_ += passed / network_->busy_slowdown;
    share_s_ += passed / static_cast<double>(flowing_.size());
  }
  now_s_ = time_s;
}

void Channel::start(Startup op) {
  if (starting_.empty()) started_s_ = 0;
  op.until_s += started_s_;
  push(starting_, op);
}

}  // namespace usbyte
