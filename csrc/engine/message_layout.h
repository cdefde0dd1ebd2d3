#pragma once

#include <cstdint>
#include <vector>

#include "usbyte/codec.h"
#include "usbyte/communicator.h"
#include "usbyte/plan.h"

namespace usbyte {

/// How an op's gradients travel as a codec's messages: one, or one for each rank, of each block.
///
/// The buffer has a part for each rank, `chunk` bytes long, from which or for which the messages
/// are; or one for all, where the network adds messages up.
struct MessageLayout {
  struct Run {
    Block block;
    int64_t at;  ///< of the buffer, bytes
  };

  MessageLayout(const Op& op, const Codec& codec, int rank, int size);

  Collective kind;  ///< of the network
  DType dtype;      ///< of what the network carries
  int64_t chunk = 0, bytes = 0;
  int ranks = 1;  ///< whose messages are decoded together, each `chunk` bytes behind the last
  /// Added to a plan's seed: a rank's shard is coded when it is scattered and when it is gathered,
  /// by other chances.
  uint64_t salt = 0;
  std::vector<Run> sent;      ///< what this rank encodes
  std::vector<Run> received;  ///< what it decodes
};

}  // namespace usbyte
