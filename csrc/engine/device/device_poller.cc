// SPDX-License-Identifier: Apache-2.0
#include "device_poller.h"

#include "usbyte/error.h"

namespace usbyte {

DevicePoller::Findings DevicePoller::look(DeviceClock& clock, Communicator& communicator,
                                          std::deque<DeviceRecord>& records, bool last) {
  Findings found;
  try {
    found.waiting = watch_.look(clock, polled_s_);
    found.problem = communicator.failure();
    while (!records.empty() && records.front().passed(clock)) {
      found.resolved.push_back(records.front().resolve(clock));
      records.pop_front();
    }
    // It may wait for the device, which may wait for the abort.
    if (!found.resolved.empty() && !last) clock.anchor();
  } catch (const Error& e) {
    found.problem = e.what();
  }
  return found;
}

}  // namespace usbyte
