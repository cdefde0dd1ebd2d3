// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "coded_progress.h"
#include "usbyte/codec.h"
#include "usbyte/policy.h"

namespace usbyte {

/// Groups of gradients that follow one another in backward, and the ops that they become: one for
/// each codec and dtype, in the order in which their last gradients are ready.
class Merging {
 public:
  Merging(const Profile& profile, const NetworkModel& network, const PolicyOptions& options);

  int tensors() const { return static_cast<int>(order_.size()); }
  /// Starts an empty group that ends before tensor `end` of backward; others are put in front of
  /// it, one by one, by `extend`.
  void start(int end);
  void extend();
  /// What the ops of the group take.
  const std::vector<OpTimes>& times();
  /// The plan of groups that end before these tensors of backward, ascending, the last one after
  /// all of them.
  Plan plan(std::string policy, const std::vector<int>& ends) const;

 private:
  struct Lane {
    std::string spec;
    std::shared_ptr<const Codec> codec;
    DType dtype;
    CodecCost cost;
  };
  struct LaneOp {  // of the group, in one lane
    int lane;
    double queued_s, due_s;
    int64_t message_bytes = 0;
    int blocks = 0;
    int64_t bytes = 0;                  // of its gradients, as float32
    double encode_s = 0, decode_s = 0;  // where its blocks, with a message each, are coded in turn
  };

  static size_t at(int i) { return static_cast<size_t>(i); }
  int64_t message_bytes(const Lane& lane, int first, int last) const;
  int messages(const Lane& lane) const;
  bool grouped(int tensor, int lane) const;
  OpTimes times_of(const LaneOp& part) const;

  const Profile* profile_;
  const NetworkModel* network_;
  bool coding_takes_time_;
  std::vector<int> order_;  // of backward
  std::vector<double> due_s_;
  std::vector<Lane> lanes_;
  std::vector<int> lane_of_;  // by tensor

  int begin_ = 0, group_ = 0;
  std::vector<LaneOp> parts_;      // the one that is ready last first
  std::vector<int> group_of_;      // by tensor: the last one that it was in
  std::vector<int> first_, last_;  // of a block of the group, at its last and its first tensor
  std::vector<OpTimes> times_;
};

}  // namespace usbyte
