// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "usbyte/codec_costs.h"
#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/profile.h"

namespace usbyte {

/// Sizes in bytes.
struct PolicyOptions {
  Overlap overlap = Overlap::forward;  ///< what the plan is made for
  /// Each rank updates its shard and parameters are gathered; needs reduce_scatters throughout.
  bool sharded = false;
  int64_t bucket_bytes = 25 << 20;       ///< ddp: bucket size
  int64_t first_bucket_bytes = 1 << 20;  ///< ddp: size of the bucket that backward fills first
  int64_t partition_bytes = 32 << 20;    ///< bytescheduler: tensors above this are split
  int64_t credit_bytes = 64 << 20;       ///< bytescheduler: bytes in flight
  int64_t unit_bytes = 256 << 10;        ///< us-byte, dcredit: what ops are made of
  int64_t fusion_bytes = 25 << 20;       ///< dear: the most that a group of tensors holds
  /// By tensor of the profile, what its gradient travels by; empty: nothing is compressed. Policies
  /// that know nothing of codecs plan without, and the plan gets them afterwards.
  std::vector<std::string> codec_of = {};
  CodecCosts codec_costs = {};  ///< of those codecs; empty: coding takes no time
};

/// Profile x NetworkModel -> Plan. The papers count a + b m for an op; where the network's startups
/// overlap with bytes, durations follow its costs and what is left for an op's bytes before a
/// deadline begins after its latency.
using Policy = Plan (*)(const Profile&, const NetworkModel&, const PolicyOptions&);

/// Wait-free backpropagation: one all_reduce for each tensor, first ready first sent, one at a
/// time. Zhang et al., "Poseidon", USENIX ATC 2017.
Plan wfbp(const Profile&, const NetworkModel&, const PolicyOptions&);

/// PyTorch DDP: neighbouring gradients in buckets, filled from the last layer on.
/// Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
Plan ddp(const Profile&, const NetworkModel&, const PolicyOptions&);

/// ByteScheduler: tensors split into near-equal parts; among the ready parts the one nearest the
/// input goes first, as long as credit lasts. Peng et al., SOSP 2019. The released code counts both
/// sizes in parameters; the defaults here are its advice for all_reduce, 8 and 16 million, at 4
/// bytes each. All ranks must agree on the order, so the priority queue is played out here under
/// the profile and the network model, and its trace becomes the plan.
Plan bytescheduler(const Profile&, const NetworkModel&, const PolicyOptions&);

/// MG-WFBP: a gradient joins the op of those before it if it is ready before that op would have
/// started up, so that waiting costs less than another startup; one at a time. Shi, Chu and Li,
/// "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM
/// 2019. An op of gradients that are no neighbours in the flat buffer has several blocks; no op
/// mixes dtypes.
Plan mgwfbp(const Profile&, const NetworkModel&, const PolicyOptions&);

/// P3: tensors cut into slices of 40,000 parameters; among the ready slices the one nearest the
/// input goes first, one at a time. With collectives instead of its parameter servers, a slice
/// waits until the one before it has come back. Jayarajan et al., "Priority-based Parameter
/// Propagation for Distributed DNN Training", MLSys 2019.
Plan p3(const Profile&, const NetworkModel&, const PolicyOptions&);

/// US-Byte: during backward the ready tensor of the highest priority is sent up to the next
/// gradient, after it one op with the rest of each tensor; one at a time. Gao et al., "US-Byte: An
/// Efficient Communication Framework for Scheduling Unequal-Sized Tensor Blocks in Distributed Deep
/// Learning", TPDS 2024. Unlike in its released code no planned byte is lost when an op is
/// extended, nothing is truncated, every op costs its bytes and no less, and forward times are the
/// profile's.
Plan us_byte(const Profile&, const NetworkModel&, const PolicyOptions&);

/// D-Credit: windows of units that are posted together and share one startup; one for each interval
/// between gradients, as large as fits into it, and after backward one for each tensor. Gao et al.,
/// "D-Credit: A Dynamic Sliding Window of Tensor Communication Mechanism to Accelerate Distributed
/// DNN Training", TNSE 2025. Unlike in its released code no window holds more than its interval
/// calls for.
Plan dcredit(const Profile&, const NetworkModel&, const PolicyOptions&);

/// DeAR: neighbouring tensors in groups, scattered as backward fills them and gathered in forward
/// order; one op at a time. Zhang et al., "DeAR: Accelerating Distributed Deep Learning with
/// Fine-Grained All-Reduce Pipelining", ICDCS 2023. Unlike in its released code the next all_gather
/// does not wait for forward to reach the group before it.
Plan dear(const Profile&, const NetworkModel&, const PolicyOptions&);

/// DeAR with the best of all fusion sizes in place of its tuner: groups change only at sums of
/// neighbouring tensors, and each grouping is tried (of more than some 4,000 tensors the most
/// promising ones). Policy "dear_exact".
Plan dear_exact(const Profile&, const NetworkModel&, const PolicyOptions&);

/// PipeDAP: DeAR with one group for each tensor, where a tensor is gathered right after it was
/// scattered if what the channel then idles and a startup are more than half of its all_reduce. Gao
/// et al., "PipeDAP: An Efficient Communication Framework for Scheduling Decoupled All-Reduce
/// Primitives in Distributed DNN Training", TETC 2025, of which only this rule is kept: its
/// released code also counts idle time further on and waits in forward.
Plan pipedap(const Profile&, const NetworkModel&, const PolicyOptions&);

/// ByteComp (Espresso): tensors are compressed where the exposed time falls, each by its codec of
/// `codec_of` and in the way that `select_strategies` of espresso/select.h finds on one link with
/// codecs on the CPU; whole tensors, one op at a time, as backward produces them. Wang et al.,
/// EuroSys 2023.
Plan bytecomp(const Profile&, const NetworkModel&, const PolicyOptions&);

/// Themis: DDP's buckets, each cut into chunks that go through the dimensions of the network in the
/// orders that its greedy rule gives them (topology/themis.h), or innermost first where that is as
/// fast, or past the dimensions where nothing else is faster, all by the simulator. Rashidi, Won,
/// Srinivasan, Sridharan and Krishna, "Themis: A Network Bandwidth-Aware Collective Scheduling
/// Policy for Distributed Training of DL Models", ISCA 2022. On a network without dimensions, DDP's
/// plan.
Plan themis(const Profile&, const NetworkModel&, const PolicyOptions&);

/// usbyte's own, "auto": unequal all_reduces over the flat buffer (or reduce_scatters and
/// all_gathers for some or all of it where they cost less), cut inside and across tensors, one or
/// several in flight, with exact batching of what backward leaves; the best of several such drafts
/// and of all other policies under the simulator, after a local search. In the model it is never
/// worse than any other policy at any of the sizes of rivals.h, with codecs or without; of its own
/// plans that are no later than these it takes the one with the fewest ops. Where everything is
/// hidden with codecs they stay; else gradients go without them where that is faster. Best where
/// alpha and beta were measured. Where the network has dimensions, all_reduces are routed through
/// them if that is faster.
Plan automatic(const Profile&, const NetworkModel&, const PolicyOptions&);

/// MergeComp: gradients that follow one another in backward are merged, each group is encoded, sent
/// and decoded as one; one op at a time. Wang, Wu and Ng, "MergeComp: A Compression Scheduler for
/// Scalable Communication-Efficient Distributed Training", 2021. A group of several codecs or
/// dtypes becomes an op for each, the one that is ready first in front.
///
/// In place of its search for two groups on the running job (policy "mergecomp_online" of the
/// Python layer), the number of groups and their boundaries are those of the least lateness on the
/// engine's timeline, which is not the paper's: one thread beside compute encodes the groups in
/// turn, the channel carries one after the other, and the same thread decodes what has come, which
/// goes before what is still to be encoded. Of up to ten tensors, and of any number where nothing
/// is compressed, no grouping is better in the model, unless more than 32 non-dominated groupings
/// meet at one boundary. Beyond that, groupings are given up that lag behind another in
/// every respect, although on a shared thread one that is behind may fall into place. Of more than
/// 512 tensors, neighbours in backward stay together so that 512 are left.
Plan mergecomp(const Profile&, const NetworkModel&, const PolicyOptions&);

/// A policy, with what all other code needs to know of it.
struct PolicyEntry {
  Policy plan;
  /// With `PolicyOptions::sharded` its plans scatter everything before they gather.
  bool shards = false;
  /// It plans with codecs. The plans of other policies get codecs afterwards.
  bool knows_codecs = false;
  /// Number of ops of its plan, of policies that may plan very many; else nullptr.
  int64_t (*count_parts)(const Profile&, const PolicyOptions&) = nullptr;
};

/// Every policy by the name that `policy_name` returns, which its plans have too. `auto` considers
/// all of them.
const std::map<std::string, PolicyEntry, std::less<>>& policies();

/// Names of the policies that plan for sharded optimizers, in alphabetical order.
std::vector<std::string> sharding_policies();

/// Runs the policy of that name, which may be a former one (`policy_name`). Throws UsageError on an
/// unknown name, unusable options, codecs that do not fit the tensors or have no costs beside
/// others that have, or a policy for a sharded optimizer that does not scatter everything before it
/// gathers.
Plan make_plan(std::string_view name, const Profile&, const NetworkModel&,
               const PolicyOptions& = {});

}  // namespace usbyte
