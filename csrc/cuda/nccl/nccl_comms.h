// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/nccl/nccl.h"
#include "nccl_communicator.h"

namespace usbyte {

/// One rank's NCCL communicators, one for each slot, from their making to their end.
///
/// NCCL is entered under `mutex_` only. It does not block there, and whoever waits for it to get on
/// lets go of the mutex, so that `abort` gets in at any time. `abort` itself enters NCCL without:
/// from then on nobody else does.
class NcclComms {
 public:
  /// Waits until all ranks are there. Throws FaultError.
  NcclComms(std::shared_ptr<NcclApi> nccl, int device, int rank, const std::vector<NcclId>& ids,
            int size, const NcclOptions& options);
  /// `close`, if it has not been called.
  ~NcclComms();

  size_t count() const { return comms_.size(); }
  /// Lets `calls` call NCCL for `slot`, and waits until what they have begun is done, as far as the
  /// host is concerned. One thread at a time. What they throw is passed on. Throws FaultError if
  /// NCCL fails or takes longer than `timeout_s`, or if all is over.
  void call(size_t slot, double timeout_s, const std::function<void(NcclComm*)>& calls);
  /// Throws FaultError, which names `function`, unless NCCL goes along.
  void check(NcclResult result, const char* function, NcclComm* comm) const;

  /// Why no call can succeed any more; empty while that is not known.
  std::string failure();
  /// Ends all communicators at once and waits for that, not longer than the close timeout; so does
  /// every later call, as NCCL writes to requests until then.
  void abort();
  /// Waits until all is over on all ranks, or aborts.
  void close();

 private:
  enum class Phase { open, closed, aborted };
  struct Progress {  // of jobs, which may outlive whoever waits for them
    double deadline_s;
    std::mutex mutex;  // guards `left`
    std::condition_variable done;
    size_t left;
  };

  void make(size_t slot, const NcclId& id, double deadline_s);
  void await(std::unique_lock<std::mutex>& lock, size_t slot, double deadline_s);
  std::string find_failure();
  std::string describe(size_t slot) const;
  std::shared_ptr<Progress> begin(std::vector<std::function<void()>> jobs) const;
  static void await(Progress& progress);

  const std::shared_ptr<NcclApi> nccl_;
  const int device_, rank_, size_;
  const NcclOptions options_;

  std::mutex mutex_;  // guards what is below
  std::condition_variable ended_;
  Phase phase_ = Phase::open;
  std::string failure_;
  std::shared_ptr<Progress> aborting_;  // once aborted
  std::vector<NcclComm*> comms_;        // by slot; never moves, since NCCL writes to it
};

}  // namespace usbyte
