// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda.h"
#include "usbyte/tensor.h"

namespace usbyte {

/// A communicator of NCCL's: an ncclComm_t.
struct NcclComm;
/// A buffer registered with all ranks: an ncclWindow_t.
struct NcclWindow;

/// What the ranks of one NCCL communicator find each other by: an ncclUniqueId.
struct NcclId {
  std::array<char, 128> bytes{};
};

/// What NCCL's functions return: an ncclResult_t. Values that are not named are errors too.
enum class NcclResult : int {
  success = 0,
  cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};

/// An ncclRedOp_t: one of these or what `reduction_create` returned.
enum class NcclReduction : int { sum = 0, product = 1, max = 2, min = 3 };

/// What a communicator is made with; it is never blocking.
struct NcclConfig {
  int min_ctas = 0;  ///< blocks of a kernel of NCCL's, 0: NCCL's choice; from kNcclCtaLimits on
  int max_ctas = 0;  ///< likewise
};

// First version that has a thing, encoded as ncclGetVersion does: 22809 is 2.28.9.
constexpr int kNcclMinimum = 21400;    ///< communicators that do not block the host
constexpr int kNcclCtaLimits = 21700;  ///< NcclConfig's limits
constexpr int kNcclMemory = 21900;     ///< mem_alloc and comm_register
constexpr int kNcclWindows = 22700;    ///< window_register

/// "2.28.9".
std::string nccl_version_text(int version);

/// The functions used of NCCL, so that all logic above them runs without a GPU too. Each is NCCL's
/// function of that name, with its rules; source: nccl.h and NCCL's user guide.
///
/// Of these rules: nobody calls in while another thread is inside a call for the same communicator,
/// nor for another one on the same device, but to abort; a communicator takes no call while its
/// `comm_async_error` is `in_progress`, except that one and `comm_abort`; what a group launches is
/// on its stream only after that. Groups belong to the thread.
///
/// Implementations: `load_nccl` (the library), FakeNccl (tests).
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  /// As ncclGetVersion encodes it.
  virtual int version() const = 0;
  /// Of the library's file.
  virtual const std::string& path() const = 0;

  /// Runs `calls` with `device` as the calling thread's current one: NCCL works on that.
  virtual void with_device(int device, const std::function<void()>& calls) = 0;

  virtual std::string error_string(NcclResult result) const = 0;
  /// Empty if nothing is known.
  virtual std::string last_error(NcclComm* comm) const = 0;

  virtual NcclResult unique_id(NcclId* id) = 0;
  /// `comm` is written at once and, until the communicator is no longer in progress, again.
  virtual NcclResult comm_init(NcclComm** comm, int size, const NcclId& id, int rank,
                               const NcclConfig& config) = 0;
  virtual NcclResult comm_async_error(NcclComm* comm, NcclResult* state) = 0;
  virtual NcclResult comm_finalize(NcclComm* comm) = 0;
  /// Blocks, as `comm_abort` does.
  virtual NcclResult comm_destroy(NcclComm* comm) = 0;
  virtual NcclResult comm_abort(NcclComm* comm) = 0;

  virtual NcclResult mem_alloc(void** memory, size_t bytes) = 0;
  virtual NcclResult mem_free(void* memory) = 0;
  virtual NcclResult comm_register(NcclComm* comm, void* memory, size_t bytes, void** handle) = 0;
  virtual NcclResult comm_deregister(NcclComm* comm, void* handle) = 0;
  /// Of all ranks together. Leaves `window` null where the machine has no use for one.
  virtual NcclResult window_register(NcclComm* comm, void* memory, size_t bytes,
                                     NcclWindow** window) = 0;
  virtual NcclResult window_deregister(NcclComm* comm, NcclWindow* window) = 0;

  /// A sum of inputs that are multiplied with `*scale` first, which is of type `dtype`.
  virtual NcclResult reduction_create(NcclReduction* reduction, const void* scale, DType dtype,
                                      NcclComm* comm) = 0;
  virtual NcclResult reduction_destroy(NcclReduction reduction, NcclComm* comm) = 0;

  // Counts are elements; of reduce_scatter and all_gather, those of one rank.
  virtual NcclResult group_start() = 0;
  virtual NcclResult group_end() = 0;
  virtual NcclResult all_reduce(const void* send, void* recv, size_t count, DType dtype,
                                NcclReduction reduction, NcclComm* comm, CudaStream stream) = 0;
  virtual NcclResult reduce(const void* send, void* recv, size_t count, DType dtype,
                            NcclReduction reduction, int root, NcclComm* comm,
                            CudaStream stream) = 0;
  virtual NcclResult reduce_scatter(const void* send, void* recv, size_t count, DType dtype,
                                    NcclReduction reduction, NcclComm* comm, CudaStream stream) = 0;
  virtual NcclResult all_gather(const void* send, void* recv, size_t count, DType dtype,
                                NcclComm* comm, CudaStream stream) = 0;
  virtual NcclResult broadcast(const void* send, void* recv, size_t count, DType dtype, int root,
                               NcclComm* comm, CudaStream stream) = 0;
  virtual NcclResult send(const void* memory, size_t count, DType dtype, int peer, NcclComm* comm,
                          CudaStream stream) = 0;
  virtual NcclResult recv(void* memory, size_t count, DType dtype, int peer, NcclComm* comm,
                          CudaStream stream) = 0;
};

/// Opens NCCL: `library` (USBYTE_NCCL_LIB) and nothing else if it is not empty; else the copy that
/// is loaded already, as torch's is; else the first of `candidates` that can be opened, paths of
/// wheels; else the system's. The process keeps the first that was opened, which is what later
/// calls return.
///
/// Throws UsageError, with the remedy, if none is found, or what is found is older than
/// kNcclMinimum or lacks a function, or if `library` is another file than the one in use.
std::shared_ptr<NcclApi> load_nccl(const std::string& library = "",
                                   const std::vector<std::string>& candidates = {});

/// Files of all copies of NCCL in this process. Two are one too many: each has its own threads,
/// memory and launch order.
std::vector<std::string> mapped_nccl_copies();

}  // namespace usbyte
