#include "sparse_ops.h"

#include <utility>

#include "usbyte/error.h"

namespace usbyte {

SparseOps::SparseOps(const Plan& plan, std::shared_ptr<Exchange> exchange,
                     std::shared_ptr<Cuda> device, SparseOptions options, Report report)
    : plan_(plan),
      exchange_(std::move(exchange)),
      options_(options),
      report_(std::move(report)),
      device_(device ? std::make_unique<DeviceRows>(std::move(device)) : nullptr),
      given_(plan.tensors().size()),
      sums_(plan.tensors().size()) {
  if (!exchange_) throw UsageError("the plan has sparse tensors: the engine needs an exchange");
  thread_ = std::thread([this] { run(); });
}

SparseOps::~SparseOps() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  thread_.join();
}

void SparseOps::give(int tensor, GivenRows rows) {
  std::lock_guard lock(mutex_);
  given_[static_cast<size_t>(tensor)] = rows;
}

void SparseOps::start(int op, StreamOrder order) {
  std::lock_guard lock(mutex_);
  started_.push_back({op, std::move(order)});
  work_.notify_one();
}

SparseSum SparseOps::take(int tensor) {
  std::lock_guard lock(mutex_);
  std::optional<SparseSum> sum = std::exchange(sums_[static_cast<size_t>(tensor)], std::nullopt);
  if (!sum) {
    throw UsageError("take_rows: the sum of '" + plan_.tensors()[static_cast<size_t>(tensor)].name +
                     "' has been taken");
  }
  return *std::move(sum);
}

void SparseOps::abort() {
  if (device_) device_->halt();
  exchange_->abort();
}

void SparseOps::run() {
  std::exception_ptr error;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !started_.empty(); });
    if (stopping_) return;
    const Started next = std::move(started_.front());
    started_.pop_front();
    const Op& op = plan_.ops()[static_cast<size_t>(next.op)];
    const auto tensor = static_cast<size_t>(op.sparse->tensor);
    lock.unlock();
    SparseSum sum;
    // Once one has failed, peers may take messages of a later op for that one's.
    if (!error) {
      try {
        sum = sum_of(next);
      } catch (...) {
        error = std::current_exception();
      }
    }
    const SparseTraffic traffic = sum.traffic;
    lock.lock();
    sums_[tensor] = std::move(sum);
    given_[tensor] = {};
    lock.unlock();
    report_(next.op, traffic, error);
    lock.lock();
  }
}

SparseSum SparseOps::sum_of(const Started& started) {
  const SparseOp& what = *plan_.ops()[static_cast<size_t>(started.op)].sparse;
  const TensorSpec& tensor = plan_.tensors()[static_cast<size_t>(what.tensor)];
  GivenRows mine;
  {
    std::lock_guard lock(mutex_);
    mine = given_[static_cast<size_t>(what.tensor)];
  }
  const SparseShape shape{tensor.rows, tensor.width, tensor.dtype};
  if (device_) mine.rows = device_->fetch(mine, shape.row_bytes(), started.order);
  SparseSum sum = sparse_scheme(what.scheme).all_reduce(*exchange_, shape, mine.rows, options_);
  if (device_) device_->finish(started.order);
  return sum;
}

}  // namespace usbyte
