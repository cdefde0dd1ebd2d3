// SPDX-License-Identifier: Apache-2.0
#include "coded_progress.h"

#include <algorithm>

namespace usbyte {

void CodedProgress::add(const OpTimes& op) {
  double start_s = op.queued_s;
  if (op.coded) {
    auto next = received_.begin();
    for (;;) {
      if (next != received_.end() && next->at_s <= thread_s_) {
        thread_s_ += next->decode_s;
        lateness_s_ = std::max(lateness_s_, thread_s_ - next->due_s);
        ++next;
      } else if (op.queued_s <= thread_s_) {
        break;
      } else {
        thread_s_ = next == received_.end() ? op.queued_s : std::min(op.queued_s, next->at_s);
      }
    }
    received_.erase(received_.begin(), next);
    start_s = thread_s_ += op.encode_s;
  }
  channel_s_ = std::max(channel_s_, start_s) + op.send_s;
  if (op.coded) {
    received_.push_back({channel_s_, op.decode_s, op.due_s});
  } else {
    lateness_s_ = std::max(lateness_s_, channel_s_ - op.due_s);
  }
}

double CodedProgress::decoded_s() const {
  double now = thread_s_;
  for (const Received& r : received_) now = std::max(now, r.at_s) + r.decode_s;
  return now;
}

double CodedProgress::lateness_s() const {
  double now = thread_s_, lateness = lateness_s_;
  for (const Received& r : received_) {
    now = std::max(now, r.at_s) + r.decode_s;
    lateness = std::max(lateness, now - r.due_s);
  }
  return lateness;
}

}  // namespace usbyte
