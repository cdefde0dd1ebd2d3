#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "device_rows.h"
#include "usbyte/exchange.h"
#include "usbyte/plan.h"
#include "usbyte/sparse.h"

namespace usbyte {

/// The thread that carries out sparse_all_reduces, one after the other in the order of their
/// launches, which is the plan's and so the same on all ranks.
///
/// Ownership: the rows given for a tensor are this one's from `start` until the op is reported; the
/// sum is the caller's from then on. Rows on a device it waits for, and nobody else does.
class SparseOps {
 public:
  /// From the thread, without any lock.
  using Report =
      std::function<void(int op, const SparseTraffic& traffic, std::exception_ptr error)>;

  /// `plan` outlives this. Rows are on `device`, or on the host if that is null. Throws UsageError
  /// without an exchange.
  SparseOps(const Plan& plan, std::shared_ptr<Exchange> exchange, std::shared_ptr<Cuda> device,
            SparseOptions options, Report report);
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
  SparseSum sum_of(const Started& started);

  const Plan& plan_;
  const std::shared_ptr<Exchange> exchange_;
  const SparseOptions options_;
  const Report report_;
  const std::unique_ptr<DeviceRows> device_;  // null on the host

  std::mutex mutex_;  // guards what is below
  std::condition_variable work_;
  std::deque<Started> started_;
  bool stopping_ = false;
  std::vector<GivenRows> given_;                // by tensor
  std::vector<std::optional<SparseSum>> sums_;  // likewise, until taken

  std::thread thread_;
};

}  // namespace usbyte
