#include "usbyte/device_clock.h"

#include <utility>

#include "usbyte/timeline.h"

namespace usbyte {

struct Moment::Anchor {
  PooledEvent event;
  double host_s;
};

DeviceClock::DeviceClock(std::shared_ptr<Cuda> cuda)
    : cuda_(std::move(cuda)), stream_(cuda_, true), events_(cuda_) {
  anchor();
}

Moment DeviceClock::moment() {
  Moment out;
  out.event_ = events_.acquire(true);
  std::lock_guard lock(mutex_);
  out.anchor_ = anchor_;
  return out;
}

Moment DeviceClock::mark(CudaStream stream) {
  const Moment out = moment();
  cuda_->record(out.event(), stream);
  return out;
}

double DeviceClock::seconds(const Moment& moment) {
  cuda_->synchronize(moment.event());
  const Moment::Anchor& anchor = *moment.anchor_;
  return anchor.host_s + cuda_->elapsed_s(anchor.event.get(), moment.event());
}

void DeviceClock::anchor() {
  const PooledEvent event = events_.acquire(true);
  const double before = now_s();
  cuda_->record(event.get(), stream_.get());
  cuda_->synchronize(event.get());
  // Streams share queues, so that it may have come behind kernels.
  constexpr double kExact = 200e-6;
  std::unique_lock lock(mutex_);
  if (anchor_ && now_s() - before > kExact) return;
  std::shared_ptr<const Moment::Anchor> taken(new Moment::Anchor{event, (before + now_s()) / 2});
  anchor_ = std::move(taken);
}

}  // namespace usbyte
