// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

#include "usbyte/network.h"
#include "usbyte/plan.h"

namespace usbyte {

/// The network as predicted: one channel that the ops in flight share. An op starts up, for its
/// alpha. Its bytes flow from the overlap at the end of the startup on; where those of several ops
/// flow, each gets an equal share of the channel, as concurrent collectives do on real networks. It
/// completes when startup and bytes are through. Beyond the network's `concurrent`, an op starts up
/// when one that was launched before has completed. Not thread-safe.
///
/// A collective goes in rounds of messages, each of which queues behind what the others in flight
/// have sent. Beside an op whose bytes flow or are about to, all rounds of another take the
/// network's `busy_alpha_s`, or what the largest op in flight needs alone if that is less; an op
/// whose bytes are through sooner completes when its rounds are. Those of an op that is alone are
/// its startup, and what is left of them when others are through takes no time.
///
/// What the network's `one_shot` takes passes by all of this; while its bytes are on the channel,
/// in n/2 times the time that they take in a ring of n, no others flow. Launching one takes its
/// gap: what is launched behind it starts up no sooner.
///
/// Time is seconds and never goes back: nothing is launched before what `advance` has reached, and
/// `advance` is called before anything is launched after `next_s`.
class Channel {
 public:
  /// `network` outlives it.
  explicit Channel(const NetworkModel& network) : network_(&network) {}

  /// Launches `op` at `now_s`. `packed`: it consists of several blocks, which lengthens the startup
  /// of an all_reduce, with all that goes for one, by the network's `pack_s_per_byte`.
  void launch(int op, Collective kind, int64_t bytes, double now_s, bool packed = false);
  /// Launches one of the given costs: it starts up for `latency_s`, and has the channel for
  /// `work_s` after that. Ops that go through the dimensions of a network share it, too, although
  /// those on different dimensions could pass each other.
  void launch_for(int op, double latency_s, double work_s, double now_s);
  /// When the next op starts up, its bytes begin or cease to flow, or it completes, if nothing is
  /// launched before; infinity when nothing is in flight.
  double next_s() const;
  /// Goes on to `next_s`, which must be finite, and returns the op that completes there, or -1.
  int advance();
  /// The moment that was last gone on to.
  double now_s() const { return now_s_; }

 private:
  struct Flight {
    double until_s;  // when it moves on; while its bytes flow, a value of `share_s_`
    int op;
    double latency_s, alpha_s;  // from its start until bytes flow, and until the startup is over
    double work_s;              // how long its bytes take with the channel to themselves
    double started_up_s;        // when the startup is over
    double rounds_until;        // in `rounds_`
    auto operator<=>(const Flight&) const = default;
  };

  void wait_for_start(Flight op);
  size_t in_progress() const { return starting_.size() + flowing_.size() + lingering_.size(); }
  size_t running() const { return in_progress() + held_.size(); }
  void shoot(int op, double work_s);
  double shot_ends_s() const;
  double starts_s() const;
  double flows_s() const;
  double lingers_s() const;
  double ends_s() const;
  double rounds_end_s() const;
  void go_on_to(double time_s);
  void start_next();
  void end_loneliness();
  void time_rounds();
  int complete_or_hold(const Flight& through);
  int complete(int op);

  const NetworkModel* network_;
  double now_s_ = 0;
  // What an op that has been flowing all along would have got of the channel, s. It passes at
  // 1 / (number of flowing ops), so that an op's bytes are through at a share that is known when
  // they begin to flow, whatever comes after.
  double share_s_ = 0;
  // How often an op that has been in flight all along would have gone through all its rounds.
  double rounds_ = 0;
  double all_rounds_s_ = 0;  // how long all of them take now
  // Heaps, what comes first on top.
  std::vector<Flight> starting_;
  std::vector<Flight> flowing_;
  std::vector<Flight> lingering_;             // their bytes are through, their startup is not
  std::vector<std::pair<double, int>> held_;  // both are through: until when in rounds_, op
  std::deque<Flight> waiting_;                // until others complete and shots are launched
  std::deque<std::pair<double, int>> shots_;  // in one shot: when it ends, op
  double last_shot_s_ = -std::numeric_limits<double>::infinity();  // when the last of all ends
  double shot_until_s_ = 0;  // until when their bytes take the channel
  double shots_sent_s_ = 0;  // until when they are being launched
};

}  // namespace usbyte
