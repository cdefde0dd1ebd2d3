#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// The network as predicted: one channel that the ops in flight share. An op starts up, for its
/// alpha (`busy_slowdown` times as long while bytes flow), and then its bytes flow; where those of
/// several ops flow, each gets an equal share of the channel, as concurrent collectives do on real
/// networks. With `serial_startups` an op starts up when the one before has completed. Not
/// thread-safe.
///
/// Time is seconds and never goes back: nothing is launched before what `advance` has reached, and
/// `advance` is called before anything is launched after `next_s`.
class Channel {
 public:
  /// `network` outlives it.
  explicit Channel(const NetworkModel& network) : network_(&network) {}

  /// Starts `op` at `now_s` as one of `in_flight` >= 1 ops, itself included.
  void launch(int op, Collective kind, int64_t bytes, int in_flight, double now_s);
  /// When an op's bytes begin to flow or an op completes, if nothing is launched before; infinity
  /// when nothing is in flight.
  double next_s() const;
  /// Goes on to `next_s` and returns the op that completes there, or -1.
  int advance();
  /// The moment that was last gone on to.
  double now_s() const { return now_s_; }

 private:
  struct Startup {
    double until_s;  // in `started_s_`; how long it takes, as long as it waits to begin
    double work_s;   // how long its bytes take with the channel to themselves
    int op;
    auto operator<=>(const Startup&) const = default;
  };

  double flows_s() const;
  double completes_s() const;
  void go_on_to(double time_s);
  void start(Startup op);

  const NetworkModel* network_;
  double now_s_ = 0;
  // What an op that has been starting up all along would have done of it. It passes more slowly
  // while bytes flow.
  double started_s_ = 0;
  // What an op that has been flowing all along would have got of the channel, s. It passes at
  // 1 / (number of flowing ops), so that an op completes at a share that is known when it begins to
  // flow, whatever comes after.
  double share_s_ = 0;
  std::vector<Startup> starting_;                // a heap, the first to flow on top
  std::vector<std::pair<double, int>> flowing_;  // share at completion, op; a heap
  std::deque<Startup> waiting_;                  // serial startups: launched, not begun
};

}  // namespace usbyte
