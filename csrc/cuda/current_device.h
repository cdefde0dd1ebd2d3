// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace usbyte {

/// While it lives, the calling thread's current device is `device`, for libraries that work on
/// that. By the driver, which all copies of the CUDA runtime in a process go by; opened at run
/// time, so that it need not exist where nothing is opened that uses it. Throws FaultError with the
/// driver's error.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
};

}  // namespace usbyte
