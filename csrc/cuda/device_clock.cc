// SPDX-License-Identifier: Apache-2.0
#include "device_clock.h"

#include <limits>
#include <thread>
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
  out.event_ = events_.acquire(EventKind::timed);
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

double DeviceClock::between(const Moment& from, const Moment& to) {
  cuda_->synchronize(from.event());
  cuda_->synchronize(to.event());
  return cuda_->elapsed_s(from.event(), to.event());
}

void DeviceClock::anchor() {
  // Streams share queues, so that an event may come behind kernels, which may hang.
  constexpr double kExact = 200e-6;
  const bool first = [this] {
    std::lock_guard lock(mutex_);
    return anchor_ == nullptr;
  }();
  double narrowest = std::numeric_limits<double>::infinity();
  std::shared_ptr<const Moment::Anchor> best;
  for (int tries = 0; tries < 5 && narrowest > kExact; ++tries) {
    const PooledEvent event = events_.acquire(EventKind::timed);
    const double before = now_s();
    cuda_->record(event.get(), stream_.get());
    while (!first && !cuda_->passed(event.get())) {
      if (now_s() - before > kExact) return;
      std::this_thread::yield();  // for less than a sleep takes
    }
    cuda_->synchronize(event.get());
    const double after = now_s();
    if (after - before >= narrowest) continue;
    narrowest = after - before;
    best.reset(new Moment::Anchor{event, (before + after) / 2});
  }
  std::lock_guard lock(mutex_);
  if (!anchor_ || narrowest <= kExact) anchor_ = std::move(best);
}

}  // namespace usbyte
