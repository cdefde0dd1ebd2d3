// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "usbyte/plan.h"
#include "usbyte/stream.h"

namespace usbyte {

struct MeshSchedule;
struct Topology;

enum class ReduceOp : uint8_t { sum, min, max, product };

/// A run of elements in memory.
struct BufferView {
  void* data = nullptr;
  int64_t count = 0;  // elements
};

/// Whether two runs of elements of `width` bytes share memory.
bool overlap(const BufferView& a, const BufferView& b, int64_t width);

/// Order of a request on a device, which its memory is then on.
struct StreamOrder {
  std::vector<CudaEvent> after;  ///< it begins once these have passed
  CudaEvent started;             ///< recorded right before it
  CudaEvent done;                ///< recorded right behind it
};

/// One collective call; every rank passes the same kind, dtype, reduction, root and counts.
///
/// `send` and `recv` may be the same memory. What each kind reads and writes:
///  - all_reduce: each span, reduced in place (`recv` only).
///  - reduce_scatter: each span in place (`recv`); afterwards this rank's `shard` of it is reduced,
///  the rest undefined.
///  - all_gather: each span in place (`recv`); this rank's `shard` of it is sent to all.
///  - broadcast: each span (`recv`), from `root`.
///  - all_to_all: one span each; `send` holds `size` equal chunks, chunk i goes to rank i; `recv`
///  likewise.
///  - barrier: no spans.
struct Request {
  Collective kind = Collective::barrier;
  DType dtype = DType::float32;
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;
  std::vector<BufferView> send;
  std::vector<BufferView> recv;
  /// Of the op, for communicators that are `stream_ordered`: at most so many bytes in flight with
  /// it (0: any number), and, with `fence`, nothing before it.
  int64_t window_bytes = 0;
  bool fence = false;
  std::optional<StreamOrder> order = std::nullopt;
  /// Multiplied with what each rank puts into a sum; 1 / size makes it the average. Only
  /// NcclCommunicator takes other than 1.
  double scale = 1;
  /// How an all_reduce goes through the dimensions of a network, for those that have a `topology`.
  /// Others do not look at it: what they do has the same result, but for the order of sums.
  std::shared_ptr<const MeshSchedule> schedule = nullptr;
  /// Among the ranks of this one's axis group in that dimension only; -1: all. Only communicators
  /// that have a `topology` take others.
  int dimension = -1;
};

/// What keeps a request of kind sparse_all_reduce from being carried out.
inline constexpr const char* kNotARequest =
    "sparse_all_reduce: its messages depend on the data; it goes over an Exchange";

/// Called exactly once for each launch, from any thread, with nullptr or the error. It may call
/// `launch` in turn, so whoever calls it holds no lock that `launch` takes.
using Completion = std::function<void(std::exception_ptr)>;

/// Starts collectives. Ranks must launch the same requests in the same order. Implementations:
/// `LocalCommunicator` (ranks are threads of one process), `PythonCommunicator` (any
/// torch.distributed backend), `StagedCommunicator` (device memory over one of those),
/// `NcclCommunicator`, and for several dimensions `MeshCommunicator` and, on devices,
/// `StreamMeshCommunicator`, over one of the others for each.
///
/// A request with an `order` is complete for the host once `order->done` has been recorded. Where
/// the communicator is `stream_ordered` that is at once, and its own streams keep windows and
/// fences; elsewhere it is when the network has done its part.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Starts `request` and returns; may call `done` before it returns. The memory must live until
  /// then. Errors go to `done`; launch itself does not throw.
  virtual void launch(const Request& request, Completion done) = 0;

  /// The dimensions that requests may be routed through; null where there are none.
  virtual const Topology* topology() const { return nullptr; }

  /// Requests complete when they are on a stream, not when they are over.
  virtual bool stream_ordered() const { return false; }
  /// What has gone wrong with requests that were complete for the host; empty while nothing has.
  virtual std::string failure() { return ""; }
  /// Ends what is in flight on devices, for good, so that nothing waits for a lost peer; also while
  /// another thread is inside `launch`, and more than once.
  virtual void abort() {}

  /// Launches and waits; throws what `done` was given.
  void run(const Request& request);
};

}  // namespace usbyte
