#include "usbyte/communicator.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace usbyte {

bool overlap(const Span& a, const Span& b, int64_t width) {
  const auto begin = [](const Span& s) { return reinterpret_cast<uintptr_t>(s.data); };
  const auto end = [&](const Span& s) {
    return begin(s) + static_cast<uintptr_t>(s.count * width);
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

void Communicator::run(const Request& request) {
  // Shared with the completion, whose thread may still be inside notify_one when run has returned.
  struct Outcome {
    std::mutex mutex;  // guards the fields below
    std::condition_variable arrived;
    bool done = false;
    std::exception_ptr error;
  };
  auto outcome = std::make_shared<Outcome>();
  launch(request, [outcome](std::exception_ptr error) {
    std::lock_guard lock(outcome->mutex);
    outcome->error = std::move(error);
    outcome->done = true;
    outcome->arrived.notify_one();
  });

  std::unique_lock lock(outcome->mutex);
  outcome->arrived.wait(lock, [&] { return outcome->done; });
  if (outcome->error) std::rethrow_exception(std::exchange(outcome->error, nullptr));
}

}  // namespace usbyte
