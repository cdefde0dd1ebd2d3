// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {

/// Whether the engine has failed, and why. A fault that this rank finds is first `found`; the
/// engine's thread turns it into the final message, which other ranks may complete. A message that
/// comes from outside is final at once. Not thread-safe.
class FaultLatch {
 public:
  /// Throws FaultError with the final message, if there is one.
  void check() const {
    if (!message_.empty()) throw FaultError(message_);
  }
  /// Empty without a final message.
  const std::string& message() const { return message_; }
  bool is_final() const { return !message_.empty(); }
  /// A fault was found or is final.
  bool any() const { return found_ || is_final(); }

  /// Notes a fault that this rank has found; the first one counts.
  void find(std::string why) {
    if (!any()) found_ = std::move(why);
  }
  /// The fault that was found and has no final message yet.
  const std::optional<std::string>& found() const { return found_; }
  void forget_found() { found_.reset(); }

  /// Makes `message` final, unless another one is. Returns whether it did.
  bool latch(std::string message) {
    if (is_final()) return false;
    message_ = message.empty() ? "communication failed" : std::move(message);
    return true;
  }

  /// True for the first caller, which aborts what is in flight.
  bool begin_abort() { return !std::exchange(abort_begun_, true); }
  bool abort_begun() const { return abort_begun_; }

  /// Counts the threads in `Engine::State::fail_externally`, for which the engine's end waits.
  void enter() { ++external_; }
  void leave() { --external_; }
  bool external() const { return external_ > 0; }
  /// From now on external faults are ignored: what does not belong to the State may be gone.
  void close() { closed_ = true; }
  bool closed() const { return closed_; }

 private:
  std::string message_;
  std::optional<std::string> found_;
  bool abort_begun_ = false;
  int external_ = 0;
  bool closed_ = false;
};

}  // namespace usbyte
