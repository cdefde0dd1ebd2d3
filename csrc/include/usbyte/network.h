// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/plan.h"
#include "usbyte/topology.h"

namespace usbyte {

/// Cost of one operation of m payload bytes: alpha + beta * m, or less where bytes already travel
/// during the startup: max(alpha, alpha - overlap + beta * m).
struct AlphaBeta {
  double alpha_s = 0;
  double beta_s_per_byte = 0;
  double overlap_s = 0;  ///< the end of the startup, during which bytes travel; at most alpha_s

  /// From the launch until the first byte travels.
  double latency_s() const { return alpha_s - overlap_s; }
  double time_s(int64_t bytes) const {
    return std::max(alpha_s, latency_s() + beta_s_per_byte * static_cast<double>(bytes));
  }
  /// Throws UsageError, beginning with `what`, unless all are finite and not negative and the
  /// overlap is no longer than the startup.
  void validate(const std::string& what) const;
  bool operator==(const AlphaBeta&) const = default;
};

/// Small all_reduces in one round of messages, on connections of their own: each rank sends all of
/// its elements to every other one and adds up what it gets. They wait for nothing else in flight.
struct OneShot {
  int64_t most_bytes = 0;  ///< of an all_reduce that goes this way
  /// Of the LogP model (Culler et al., 1993): how long one takes, and between the ends of two,
  /// which is taken for what launching one takes.
  double latency_s = 0, gap_s = 0;
  /// How long one takes at least while another op is in flight that does not go this way.
  double busy_latency_s = 0;

  bool takes(Collective kind, int64_t bytes) const {
    return kind == Collective::all_reduce && bytes <= most_bytes;
  }
  bool operator==(const OneShot&) const = default;
};

/// What the network costs `ranks` ranks, on the path that training uses.
///
/// Entry k - 1 of a collective is what an op costs that is launched as one of k in flight: its
/// startup, which overlaps with those of the others, and for each byte its time if it had the
/// network to itself, which the ops in flight share equally. So k ops of m bytes that are posted
/// together have all ended after about time_s(k * m), from which a probe finds the entries.
/// More ops in flight cost what the last entry says.
///
/// Startups overlap where they are latency; how much that is worth a probe tells, by more entries.
/// With one entry it is an assumption, and the best case for plans with several ops in flight.
struct NetworkModel {
  int ranks = 1;
  std::vector<AlphaBeta> all_reduce = {{}};
  /// Where empty, half of an all_reduce.
  std::vector<AlphaBeta> reduce_scatter = {};
  std::vector<AlphaBeta> all_gather = {};
  /// How many ops run at once: others start up when one before them has completed, as on one NCCL
  /// stream (1) or with the threads of Gloo (2). 0: any number.
  int concurrent = 0;
  /// How long an op takes at least while bytes of other ops flow, s: its messages queue behind
  /// theirs, step after step. That is why a small op beside a large one is slow, although it takes
  /// next to nothing of the channel.
  double busy_alpha_s = 0;
  /// What it takes to pack an all_reduce of several blocks into one message and to put the blocks
  /// back, s/byte; the number of blocks does not count. Other collectives go block by block.
  double pack_s_per_byte = 0;
  OneShot one_shot = {};
  /// Its dimensions, through which all_reduces may be routed; none: they go as the costs above say.
  std::optional<Topology> topology = std::nullopt;

  /// Cost of a plan's op while `in_flight` >= 1 ops are in flight, itself included, of which no
  /// more than `concurrent` count.
  AlphaBeta cost(Collective kind, int in_flight) const;
  /// The least time in which any number of ops moves a byte through a whole all_reduce, s/byte,
  /// routed or not.
  double least_beta() const;

  /// The same where everything takes `alpha` times as long but what goes by the byte: beta takes
  /// `beta` times as long, packing stays.
  NetworkModel scaled(double alpha, double beta) const;

  /// Ring collectives over links of `bytes_per_s` whose messages take `latency_s`: all_reduce
  /// 2(n-1) (latency + m / (n bytes_per_s)), reduce_scatter and all_gather half of it. Thakur,
  /// Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
  static NetworkModel ring(int ranks, double latency_s, double bytes_per_s, int concurrent = 0);

  /// Throws UsageError unless there is a rank, all_reduce has an entry, all numbers are valid and
  /// the topology, if there is one, has as many ranks.
  void validate() const;
  std::string to_json() const;
  static NetworkModel from_json(std::string_view json);
  bool operator==(const NetworkModel&) const = default;
};

/// One measured operation.
struct Sample {
  int64_t bytes;
  double seconds;
};

/// A cost and how well it fits.
struct Fit {
  AlphaBeta cost;
  double residual;  ///< median over sizes of |predicted - measured| / measured
};

/// A cost from repeated measurements of several sizes. alpha is what the small ones take on
/// average, outliers aside, whose bytes are no more than a tenth of it; beta makes the largest size
/// cost its median. Of 33 overlaps from none to the whole startup, the one is taken that makes the
/// mean relative error over all sizes least; of those that are nearly as good the largest, which is
/// also what too few sizes to tell end in: beta must not be made small by noise, since bounds come
/// from it. Throws UsageError on no samples.
Fit fit_cost(std::span<const Sample> samples);

}  // namespace usbyte
