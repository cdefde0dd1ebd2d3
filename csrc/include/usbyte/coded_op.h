#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "usbyte/codec.h"
#include "usbyte/communicator.h"
#include "usbyte/plan.h"

namespace usbyte {

/// What coded ops work on; `plan`, `arena` and `memory` outlive them.
struct CodingSpace {
  const Plan& plan;
  std::byte* arena;
  /// Rows of what codecs remember, each of as many float32 as the arena has elements; null if no
  /// codec remembers anything.
  float* memory;
  int rank, size;
  uint64_t seed;
};

/// An op whose gradients travel as a codec's messages: how they are made, what travels, and what
/// becomes of it. `encode` fills the request's buffer; when the request has completed, `decode`
/// reads it. All coded ops of a plan are used by one thread.
class CodedOp {
 public:
  virtual ~CodedOp() = default;

  virtual void encode(int64_t step) = 0;
  virtual void decode(int64_t step) = 0;
  /// Its window and fence are the plan's.
  const Request& request() const { return request_; }

 protected:
  CodedOp(const Op& planned, Collective kind, DType dtype);
  /// Makes the buffer that the request sends and receives.
  std::byte* allocate(int64_t bytes);

 private:
  std::vector<std::byte> buffer_;
  Request request_;
};

/// By op of the plan; null for ops without a codec. Throws UsageError where memory is missing.
std::vector<std::unique_ptr<CodedOp>> make_coded_ops(const CodingSpace& space);

}  // namespace usbyte
