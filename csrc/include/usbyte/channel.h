#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// The network as predicted: one channel that the ops in flight share. An op starts up, for its
/// alpha, and then its bytes flow; where those of several ops flow, each gets an equal share of the
/// channel, as concurrent collectives do on real networks. While others flow no op is through
/// before the network's `busy_alpha_s`, though its bytes may be. With `serial_startups` an op
/// starts up when the one before has completed. Not thread-safe.
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
  struct Launched {
    double until_s;  // when it has started up; until it begins to, how long that takes
    double work_s;   // how long its bytes take with the channel to themselves
    double lag_s;    // how much longer it takes at least while others flow
    int op;
    auto operator<=>(const Launched&) const = default;
  };
  struct Flow {
    double until_s;  // in `share_s_`
    double lag_until_s;
    int op;
    auto operator<=>(const Flow&) const = default;
  };

  double flows_s() const;
  double ends_s() const;
  double lag_ends_s() const;
  void go_on_to(double time_s);
  void start(Launched op);
  int complete(int op);

  const NetworkModel* network_;
  double now_s_ = 0;
  // What an op that has been flowing all along would have got of the channel, s. It passes at
  // 1 / (number of flowing ops), so that an op's bytes are through at a share that is known when
  // they begin to flow, whatever comes after.
  double share_s_ = 0;
  // Heaps, what comes first on top.
  std::vector<Launched> starting_;
  std::vector<Flow> flowing_;
  std::vector<std::pair<double, int>> lagging_;  // their bytes are through; until when, op
  std::deque<Launched> waiting_;                 // serial startups: launched, not begun
};

}  // namespace usbyte
