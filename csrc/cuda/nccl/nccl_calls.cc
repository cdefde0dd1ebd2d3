// SPDX-License-Identifier: Apache-2.0
#include "nccl_calls.h"

#include <bit>
#include <cstddef>
#include <cstdint>

#include "comm/cpu_collective.h"
#include "support/half.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

NcclReduction reduction_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return NcclReduction::sum;
    case ReduceOp::min:
      return NcclReduction::min;
    case ReduceOp::max:
      return NcclReduction::max;
    case ReduceOp::product:
      return NcclReduction::product;
  }
  return NcclReduction::sum;
}

/// `value` in the type's own bits, at the low end.
uint64_t bits_of(double value, DType dtype) {
  const float single = static_cast<float>(value);
  switch (dtype) {
    case DType::float64:
      return std::bit_cast<uint64_t>(value);
    case DType::float16:
      return from_float<Half>(single).bits;
    case DType::bfloat16:
      return from_float<BFloat16>(single).bits;
    default:
      return std::bit_cast<uint32_t>(single);
  }
}

// The calls of one group.
class Calls {
 public:
  Calls(const NcclTarget& target, const Request& request) : t_(target), request_(request) {}

  void make() {
    reduction_ = reduction_of(request_.reduce);
    const bool scaled = request_.scale != 1;
    if (scaled) create_reduction();
    for (const BufferView& span : request_.recv) {
      if (span.count > 0) make(span);
    }
    // NCCL has taken what it needs of it.
    if (scaled) check(t_.nccl.reduction_destroy(reduction_, t_.comm), "ncclRedOpDestroy");
  }

 private:
  void check(NcclResult result, const char* function) const {
    t_.comms.check(result, function, t_.comm);
  }

  void create_reduction() {
    const uint64_t scale = bits_of(request_.scale, request_.dtype);
    static_assert(std::endian::native == std::endian::little);
    check(t_.nccl.reduction_create(&reduction_, &scale, request_.dtype, t_.comm),
          "ncclRedOpCreatePreMulSum");
  }

  static size_t length(int64_t count) { return static_cast<size_t>(count); }

  std::byte* at(const BufferView& span, int64_t element) const {
    return static_cast<std::byte*>(span.data) + element * itemsize(request_.dtype);
  }

  Block part(const BufferView& span, int rank) const {
    return shard({0, span.count}, rank, t_.size);
  }

  void make(const BufferView& span) {
    switch (request_.kind) {
      case Collective::all_reduce:
      case Collective::barrier:
        return check(t_.nccl.all_reduce(span.data, span.data, length(span.count), request_.dtype,
                                        reduction_, t_.comm, t_.stream),
                     "ncclAllReduce");
      case Collective::reduce_scatter:
        return reduce_scatter(span);
      case Collective::all_gather:
        return all_gather(span);
      case Collective::broadcast:
        return check(t_.nccl.broadcast(span.data, span.data, length(span.count), request_.dtype,
                                       request_.root, t_.comm, t_.stream),
                     "ncclBroadcast");
      case Collective::all_to_all:
        return all_to_all(span);
      case Collective::sparse_all_reduce:
        throw UsageError(kNotARequest);
    }
  }

  void reduce_scatter(const BufferView& span) {
    if (span.count % t_.size == 0) {
      const Block own = part(span, t_.rank);
      return check(t_.nccl.reduce_scatter(span.data, at(span, own.begin), length(own.numel()),
                                          request_.dtype, reduction_, t_.comm, t_.stream),
                   "ncclReduceScatter");
    }
    for (int r = 0; r < t_.size; ++r) {
      const Block its = part(span, r);
      if (its.numel() == 0) continue;
      check(t_.nccl.reduce(at(span, its.begin), at(span, its.begin), length(its.numel()),
                           request_.dtype, reduction_, r, t_.comm, t_.stream),
            "ncclReduce");
    }
  }

  void all_gather(const BufferView& span) {
    if (span.count % t_.size == 0) {
      const Block own = part(span, t_.rank);
      return check(t_.nccl.all_gather(at(span, own.begin), span.data, length(own.numel()),
                                      request_.dtype, t_.comm, t_.stream),
                   "ncclAllGather");
    }
    for (int r = 0; r < t_.size; ++r) {
      const Block its = part(span, r);
      if (its.numel() == 0) continue;
      check(t_.nccl.broadcast(at(span, its.begin), at(span, its.begin), length(its.numel()),
                              request_.dtype, r, t_.comm, t_.stream),
            "ncclBroadcast");
    }
  }

  void all_to_all(const BufferView& span) {
    const int64_t chunk = span.count / t_.size;
    for (int r = 0; r < t_.size; ++r) {
      if (r == t_.rank) continue;
      check(t_.nccl.send(at(request_.send[0], r * chunk), length(chunk), request_.dtype, r, t_.comm,
                         t_.stream),
            "ncclSend");
      check(t_.nccl.recv(at(span, r * chunk), length(chunk), request_.dtype, r, t_.comm, t_.stream),
            "ncclRecv");
    }
  }

  const NcclTarget& t_;
  const Request& request_;
  NcclReduction reduction_ = NcclReduction::sum;
};

}  // namespace

std::string nccl_problem(const Request& request, int size) {
  const std::string kind(name(request.kind));
  if (request.scale != 1 &&
      !(reduces(request.kind) && request.reduce == ReduceOp::sum && is_floating(request.dtype))) {
    return kind + " of " + std::string(name(request.dtype)) +
           " with a scale: only floating-point sums take one";
  }
  // The rest is as among ranks on a host, which reduce fewer types and do not scale.
  Request shape = request;
  shape.dtype = DType::float32;
  shape.scale = 1;
  return problem(shape, size);
}

void call_nccl(const NcclTarget& target, const Request& request) {
  target.comms.check(target.nccl.group_start(), "ncclGroupStart", target.comm);
  try {
    Calls(target, request).make();
  } catch (...) {
    // Groups belong to the thread: an open one would swallow its next calls.
    target.nccl.group_end();
    throw;
  }
  target.comms.check(target.nccl.group_end(), "ncclGroupEnd", target.comm);
}

}  // namespace usbyte
