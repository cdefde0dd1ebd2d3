// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/cuda.h"
#include "usbyte/codec.h"
#include "usbyte/communicator.h"
#include "usbyte/plan.h"
#include "usbyte/sparse.h"

namespace usbyte {

class CancellationToken;

/// What coded ops work on; `plan`, `flat_buffer` and `codec_state` outlive them.
struct CodingSpace {
  const Plan& plan;
  std::byte* flat_buffer;  ///< on `device`, if there is one
  /// Rows of what codecs remember, each of as many float32 as the flat buffer has elements; where
  /// the flat buffer is. Null if no codec remembers anything.
  float* codec_state;
  int rank, size;
  uint64_t seed;
  std::shared_ptr<Cuda> device = nullptr;
  CancellationToken* cancellation = nullptr;  ///< ends waits for the device; outlives them
  const Topology* mesh = nullptr;             ///< of the ranks; null where there are no dimensions
};

/// The step and, on a device, the stream order in which a coded op runs: `encode` runs after
/// `order->after`, the network as `order` says, and `done` is recorded once the flat buffer holds
/// what was decoded.
struct CodingContext {
  int64_t step = 0;
  std::optional<StreamOrder> order = std::nullopt;
  CudaEvent done = {};
};

/// An op whose gradients travel as a codec's messages: how they are made, what travels, and what
/// becomes of it. `encode` fills the request's buffer; when the request has completed, `decode`
/// reads it. Of an op with a scheme there is no request: it has `rows` then, and is given their
/// `sum`. All coded ops of a plan are used by one thread, which they may block for a device; what
/// rows become is another's business in between.
class CodedOp {
 public:
  virtual ~CodedOp() = default;

  virtual void encode(const CodingContext& context) = 0;
  virtual void decode(const CodingContext& context) = 0;
  /// Once the network has ended: waits up to a second for the device. Returns whether no work of
  /// this op is left on its streams; false without a device, as nothing tells it then.
  virtual bool quiesce() { return false; }
  /// What this rank adds to the sum; until that is given.
  virtual RowsView rows() const { return {}; }
  virtual void sum(SparseRows /*rows*/) {}
  /// Its window and fence are the plan's.
  const Request& request() const { return request_; }
  /// Blocks of the flat buffer that `encode` reads, and that `decode` writes.
  const std::vector<Block>& reads() const { return reads_; }
  const std::vector<Block>& writes() const { return writes_; }
  /// Blocks whose state both change.
  const std::vector<Block>& keeps() const { return keeps_; }

 protected:
  CodedOp(const Op& planned, Collective kind, DType dtype);
  /// The request sends and receives so many bytes, for which there is room here.
  void travels(std::byte* buffer, int64_t bytes);

  Request request_;
  std::vector<Block> reads_, writes_, keeps_;
};

/// By op of the plan; null for ops without a codec. Where there is a device, casts and codecs that
/// work by groups are kernels; others code on the host what is copied to and fro. Throws UsageError
/// where the state is missing.
std::vector<std::unique_ptr<CodedOp>> make_coded_ops(const CodingSpace& space);

}  // namespace usbyte
