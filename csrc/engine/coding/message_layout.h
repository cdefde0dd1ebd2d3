// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "usbyte/codec.h"
#include "usbyte/communicator.h"
#include "usbyte/plan.h"
#include "usbyte/topology.h"

namespace usbyte {

/// What a rank codes of an op, and who it is among those that exchange the messages.
struct CodedShare {
  /// `of` among all ranks, `among` so many. `mesh` may be null for ops among all ranks.
  CodedShare(const Op& planned, const Topology* mesh, int of, int among);

  Op op;           ///< of the blocks that it works on, of which there may be none
  int rank, size;  ///< in its axis group, if the op has a dimension
  int drawer;      ///< whose chance it codes by: a rank, or a number that no rank has
};

/// How an op's gradients travel as a codec's messages: one, or one for each rank, of each block.
///
/// The buffer has a part for each rank, `chunk` bytes long, from which or for which the messages
/// are; or one for all, where the network adds messages up.
struct MessageLayout {
  struct MessageBlock {
    Block block;
    int64_t at;  ///< of the buffer, bytes
  };

  MessageLayout(const CodedShare& part, const Codec& codec);

  Collective kind;  ///< of the network
  DType dtype;      ///< of what the network carries
  int64_t chunk = 0, bytes = 0;
  int ranks = 1;  ///< whose messages are decoded together, each `chunk` bytes behind the last
  /// Added to a plan's seed: a rank's shard is coded when it is scattered and when it is gathered,
  /// by other chances.
  uint64_t salt = 0;
  std::vector<MessageBlock> sent;      ///< what this rank encodes
  std::vector<MessageBlock> received;  ///< what it decodes
};

}  // namespace usbyte
