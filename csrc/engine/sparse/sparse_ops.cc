// SPDX-License-Identifier: Apache-2.0
#include "sparse_ops.h"

#include <cfenv>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {

SparseOps::SparseOps(const Plan& plan, CodecWorker* coding, std::shared_ptr<Exchange> exchange,
                     std::shared_ptr<Cuda> device, SparseOptions options, Callback report)
    : plan_(plan),
      coding_(coding),
      exchange_(std::move(exchange)),
      options_(options),
      report_(std::move(report)),
      device_(device ? std::make_unique<DeviceRows>(std::move(device)) : nullptr),
      given_(plan.tensors().size()),
      sums_(plan.tensors().size()) {
  if (!exchange_) throw UsageError("the plan adds up rows: the engine needs an exchange");
  thread_ = std::thread([this] { run(); });
}

SparseOps::~SparseOps() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  thread_.join();
}

void SparseOps::give(int tensor, GivenRows rows) {
  MutexLock lock(mutex_);
  given_[static_cast<size_t>(tensor)] = rows;
}

void SparseOps::start(int op, StreamOrder order) {
  MutexLock lock(mutex_);
  started_.push_back({op, std::move(order)});
  work_.notify_one();
}

SparseSum SparseOps::take(int tensor) {
  MutexLock lock(mutex_);
  std::optional<SparseSum> sum = std::exchange(sums_[static_cast<size_t>(tensor)], std::nullopt);
  if (!sum) {
    throw UsageError("take_rows: the sum of '" + plan_.tensors()[static_cast<size_t>(tensor)].name +
                     "' has been taken");
  }
  return *std::move(sum);
}

void SparseOps::abort() {
  if (device_) device_->cancel();
  exchange_->abort();
}

void SparseOps::run() {
  std::fesetenv(FE_DFL_ENV);  // who made the thread may flush subnormals
  std::exception_ptr error;
  MutexLock lock(mutex_);
  for (;;) {
    while (!stopping_ && started_.empty()) work_.wait(mutex_);
    if (stopping_) return;
    const Started next = std::move(started_.front());
    started_.pop_front();
    MutexUnlock unlocked(mutex_);
    SparseTraffic traffic;
    // Once one has failed, peers may take messages of a later op for that one's.
    if (!error) {
      try {
        traffic = execute(next);
      } catch (...) {
        error = std::current_exception();
      }
    }
    report_(next.op, traffic, error);
  }
}

SparseTraffic SparseOps::execute(const Started& started) {
  const Op& op = plan_.ops()[static_cast<size_t>(started.op)];
  return op.sparse ? add_up_tensor(op, started.order) : add_up_picks(op, coding_->op(started.op));
}

SparseTraffic SparseOps::add_up_tensor(const Op& op, const StreamOrder& order) {
  const auto tensor = static_cast<size_t>(op.sparse->tensor);
  GivenRows mine;
  {
    MutexLock lock(mutex_);
    mine = std::exchange(given_[tensor], {});
  }
  const SparseShape shape = plan_.shape(op);
  const SparseScheme& scheme = sparse_scheme(op.sparse_scheme());
  if (device_) device_->begin(order);
  std::optional<PartitionedRows> partitioned;
  if (device_ && scheme.run_partitioned) {
    partitioned = device_->partition(mine, shape, exchange_->size(), options_);
  }
  if (device_ && !partitioned) mine.rows = device_->fetch(mine, shape.row_bytes());
  SparseSum sum = partitioned ? scheme.all_reduce_partitioned(*exchange_, shape, *partitioned)
                              : scheme.all_reduce(*exchange_, shape, mine.rows, options_);
  if (device_) device_->finish(order);
  const SparseTraffic traffic = sum.traffic;
  MutexLock lock(mutex_);
  sums_[tensor] = std::move(sum);
  return traffic;
}

// What is picked has been scaled, as gradients are.
SparseTraffic SparseOps::add_up_picks(const Op& op, CodedOp& coded) {
  SparseOptions options = options_;
  options.scale = 1;
  SparseSum sum = sparse_scheme(op.sparse_scheme())
                      .all_reduce(*exchange_, plan_.shape(op), coded.rows(), options);
  coded.sum(std::move(sum.rows));
  return sum.traffic;
}

}  // namespace usbyte
