// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "usbyte/communicator.h"

// How a request on device memory is cut into messages that fit a host buffer.
namespace usbyte {

/// Between `device`, in the request's memory, and byte `offset` of the buffer.
struct StagedCopy {
  void* device = nullptr;
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// One message: what is copied into a buffer, the first `count` elements of which take part in a
/// collective of the request's kind as one span, and what is copied back. Elements that are copied
/// by neither are padding.
struct StagedChunk {
  int64_t count = 0;
  std::vector<StagedCopy> out;
  std::vector<StagedCopy> in;
};

/// What keeps `request` from being staged among `size` ranks; empty if nothing does.
std::string staging_problem(const Request& request, int size);

/// The messages of a request that has no problem, in order; their counts are the same on every
/// rank. Small spans share one. Where each rank has a shard, or for all_to_all a part, a message
/// takes the same sub-range of all shards, side by side: one collective's shards are then those of
/// the request. A barrier is one message of no elements; what has no elements, none.
std::vector<StagedChunk> stage(const Request& request, int rank, int size, int64_t buffer_bytes);

}  // namespace usbyte
