// SPDX-License-Identifier: Apache-2.0
#include "stream_window.h"

#include <algorithm>

namespace usbyte {

StreamPlacement StreamWindow::place(int64_t bytes, int64_t window_bytes, bool fence) {
  const auto admits = [&] {
    if (flights_.empty()) return true;
    if (fence || static_cast<int>(flights_.size()) == slots_) return false;
    return window_bytes == 0 || bytes_ + bytes <= window_bytes;
  };
  StreamPlacement out;
  while (!admits()) {
    out.after.push_back(flights_.front().slot);
    bytes_ -= flights_.front().bytes;
    flights_.pop_front();
  }
  if (out.after.empty()) {
    out.slot = free_slot();
  } else {
    // Behind the newest that it waits for: the stream itself is that wait.
    out.slot = out.after.back();
    out.after.pop_back();
  }
  flights_.push_back({out.slot, bytes});
  bytes_ += bytes;
  return out;
}

int StreamWindow::free_slot() const {
  int slot = 0;
  while (std::any_of(flights_.begin(), flights_.end(),
                     [slot](const Flight& f) { return f.slot == slot; })) {
    ++slot;
  }
  return slot;
}

}  // namespace usbyte
