// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <vector>

namespace usbyte {

/// What one op takes when no other is in flight, s.
struct OpTimes {
  double queued_s;  ///< when its last gradient is ready
  double encode_s, send_s, decode_s;
  double due_s;
  bool coded;  ///< needs the coding thread, even where that takes no time
};

/// How far the engine has come with ops that go one at a time, in order of their gradients: the
/// channel carries one after the other; one thread encodes those that are coded, in turn, and
/// decodes what has come, which goes before what is still to be encoded. What the simulator says of
/// fenced ops, op by op.
class CodedProgress {
 public:
  /// The next op, whose gradients are ready no sooner than those of the ops before.
  void add(const OpTimes& op);

  /// When the channel, the coding thread, and the thread after all decoding are free, s.
  double channel_s() const { return channel_s_; }
  double thread_s() const { return thread_s_; }
  double decoded_s() const;
  /// The largest arrival minus due date, s, if no more were to be encoded; whatever is added, it
  /// does not fall.
  double lateness_s() const;

 private:
  struct Received {
    double at_s, decode_s, due_s;
  };

  double channel_s_ = 0, thread_s_ = 0;
  double lateness_s_ = -std::numeric_limits<double>::infinity();
  std::vector<Received> received_;  // not decoded before `thread_s_`, in order
};

}  // namespace usbyte
