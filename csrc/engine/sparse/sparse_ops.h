// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "device_rows.h"
#include "engine/coding/codec_worker.h"
#include "support/thread_annotations.h"
#include "usbyte/exchange.h"
#include "usbyte/plan.h"
#include "usbyte/sparse.h"

namespace usbyte {

/// The thread that carries out ops that add up rows by a scheme, one after the other in the order
/// of their launches, which is the plan's and so the same on all ranks.
///
/// Ownership: the rows given for a tensor, or of a coded op, are this one's from `start` until the
/// op is reported; the sum is the caller's, or the coded op's, from then on. Rows of a tensor on a
/// device it waits for, and nobody else does.
class SparseOps {
 public:
  /// From the thread, without any lock.
  using Callback =
      std::function<void(int op, const SparseTraffic& traffic, std::exception_ptr error)>;

  /// `plan` and `coding`, null if no op has a codec, outlive this. Tensors' rows are on `device`,
  /// or on the host if that is null; those of coded ops are on the host. Throws UsageError without
  /// an exchange.
  SparseOps(const Plan& plan, CodecWorker* coding, std::shared_ptr<Exchange> exchange,
            std::shared_ptr<Cuda> device, SparseOptions options, Callback report);
  ~SparseOps();

  /// What tensor t adds; its memory lives until its op is reported.
  void give(int tensor, GivenRows rows);
  /// On a device as `order` says, whose events live until the op is reported.
  void start(int op, StreamOrder order = {});
  /// The sum for a tensor. Throws UsageError if it has been taken.
  SparseSum take(int tensor);
  /// Ends what is on its way, for good.
  void abort();

 private:
  struct Started {
    int op;
    StreamOrder order;
  };

  void run();
  SparseTraffic execute(const Started& started);
  SparseTraffic add_up_tensor(const Op& op, const StreamOrder& order);
  SparseTraffic add_up_picks(const Op& op, CodedOp& coded);

  const Plan& plan_;
  CodecWorker* const coding_;
  const std::shared_ptr<Exchange> exchange_;
  const SparseOptions options_;
  const Callback report_;
  const std::unique_ptr<DeviceRows> device_;  // null on the host

  Mutex mutex_;
  ConditionVariable work_;
  std::deque<Started> started_ USBYTE_GUARDED_BY(mutex_);
  bool stopping_ USBYTE_GUARDED_BY(mutex_) = false;
  std::vector<GivenRows> given_ USBYTE_GUARDED_BY(mutex_);  // by tensor
  // By tensor, until taken.
  std::vector<std::optional<SparseSum>> sums_ USBYTE_GUARDED_BY(mutex_);

  std::thread thread_;
};

}  // namespace usbyte
