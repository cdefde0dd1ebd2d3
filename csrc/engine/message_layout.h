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
  /// A run that this rank encodes.
  struct Sent {
    Block block;
    int64_t at;  ///< bytes
  };
  /// A run that it decodes: of `ranks` messages, a chunk from each other.
  struct Received {
    Block block;
    int64_t at;  ///< bytes
  };

  MessageLayout(const Op& op, const Codec& codec, int rank, int size);

  Collective kind;  ///< of the network
  DType dtype;      ///< of what the network carries
  int64_t chunk = 0, bytes = 0;
  int ranks = 1;
  /// Added to a plan's seed: a rank's shard is coded when it is scattered and when it is gathered,
  /// by other chances.
  uint64_t salt = 0;
  std::vector<Sent> sent;
  std::vector<Received> received;
};

}  // namespace usbyte
