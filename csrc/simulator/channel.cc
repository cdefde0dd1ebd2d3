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
  const Launched launched{cost.alpha_s, cost.beta_s_per_byte * static_cast<double>(bytes),
                          std::max(network_->busy_alpha_s - cost.alpha_s, 0.0), op};
  if (network_->serial_startups && !(starting_.empty() && flowing_.empty())) {
    waiting_.push_back(launched);
  } else {
    start(launched);
  }
}

double Channel::next_s() const { return std::min({flows_s(), ends_s(), lag_ends_s()}); }

int Channel::advance() {
  const double flows = flows_s(), ends = ends_s(), lag_ends = lag_ends_s();
  if (lag_ends <= std::min(flows, ends)) {
    go_on_to(lag_ends);
    return complete(pop(lagging_).second);
  }
  if (flows < ends) {
    const Launched first = pop(starting_);
    go_on_to(flows);
    push(flowing_, {share_s_ + first.work_s, now_s_ + first.lag_s, first.op});
    return -1;
  }
  go_on_to(ends);
  const Flow through = pop(flowing_);
  if (flowing_.empty()) {
    share_s_ = 0;
    return complete(through.op);
  }
  share_s_ = through.until_s;
  if (through.lag_until_s <= now_s_) return complete(through.op);
  push(lagging_, {through.lag_until_s, through.op});
  return -1;
}

double Channel::flows_s() const { return starting_.empty() ? kNever : starting_.front().until_s; }

double Channel::ends_s() const {
  if (flowing_.empty()) return kNever;
  return now_s_ + (flowing_.front().until_s - share_s_) * static_cast<double>(flowing_.size());
}

double Channel::lag_ends_s() const {
  if (lagging_.empty()) return kNever;
  return flowing_.empty() ? now_s_ : lagging_.front().first;
}

void Channel::go_on_to(double time_s) {
  if (!flowing_.empty()) share_s_ += (time_s - now_s_) / static_cast<double>(flowing_.size());
  now_s_ = time_s;
}

void Channel::start(Launched op) {
  op.until_s += now_s_;
  push(starting_, op);
}

int Channel::complete(int op) {
  if (!waiting_.empty()) {
    start(waiting_.front());
    waiting_.pop_front();
  }
  return op;
}

}  // namespace usbyte
