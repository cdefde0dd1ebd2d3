// SPDX-License-Identifier: Apache-2.0
#include "usbyte/communicator.h"

#include <memory>
#include <utility>

#include "support/thread_annotations.h"

namespace usbyte {

bool overlap(const BufferView& a, const BufferView& b, int64_t width) {
  const auto begin = [](const BufferView& s) { return reinterpret_cast<uintptr_t>(s.data); };
  const auto end = [&](const BufferView& s) {
    return begin(s) + static_cast<uintptr_t>(s.count * width);
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

void Communicator::run(const Request& request) {
  // Shared with the completion, whose thread may still be inside notify_one when run has returned.
  struct Outcome {
    Mutex mutex;
    ConditionVariable arrived;
    bool done USBYTE_GUARDED_BY(mutex) = false;
    std::exception_ptr error USBYTE_GUARDED_BY(mutex);
  };
  auto outcome = std::make_shared<Outcome>();
  launch(request, [outcome](std::exception_ptr error) {
    MutexLock lock(outcome->mutex);
    outcome->error = std::move(error);
    outcome->done = true;
    outcome->arrived.notify_one();
  });

  MutexLock lock(outcome->mutex);
  while (!outcome->done) outcome->arrived.wait(outcome->mutex);
  if (outcome->error) std::rethrow_exception(std::exchange(outcome->error, nullptr));
}

}  // namespace usbyte
