// SPDX-License-Identifier: Apache-2.0
#include "event_pool.h"

#include <chrono>
#include <thread>
#include <utility>

#include "usbyte/timeline.h"

namespace usbyte {

EventPool::Free::~Free() {
  for (const auto& list : events) {
    for (CudaEvent event : list) cuda->destroy(event);
  }
}

bool passes_within(Cuda& cuda, CudaEvent event, double seconds) {
  const double deadline_s = now_s() + seconds;
  while (!cuda.passed(event)) {
    if (now_s() > deadline_s) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

EventPool::EventPool(std::shared_ptr<Cuda> cuda) : free_(std::make_shared<Free>(std::move(cuda))) {}

PooledEvent EventPool::acquire(EventKind kind) {
  CudaEvent event;
  {
    std::lock_guard lock(free_->mutex);
    auto& list = free_->events[static_cast<size_t>(kind)];
    if (!list.empty()) {
      event = list.back();
      list.pop_back();
    }
  }
  if (event == CudaEvent{}) event = free_->cuda->create_event(kind);
  const auto give_back = [free = free_, kind](const CudaEvent* mine) {
    {
      std::lock_guard lock(free->mutex);
      free->events[static_cast<size_t>(kind)].push_back(*mine);
    }
    delete mine;
  };
  return PooledEvent(std::shared_ptr<const CudaEvent>(new CudaEvent(event), give_back));
}

}  // namespace usbyte
