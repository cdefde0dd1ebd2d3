// SPDX-License-Identifier: Apache-2.0
#include "nccl_communicator.h"

#include <chrono>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/cpu_collective.h"
#include "cuda/communicators/stream_window.h"
#include "cuda/event_waiter.h"
#include "nccl_buffers.h"
#include "nccl_calls.h"
#include "nccl_comms.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

struct Slot {
  CudaStream stream;
  CudaEvent started;                // its last launch may start
  CudaEvent done;                   // what is on the stream is over; recorded for who waits
  void* token;                      // what a barrier reduces
  std::vector<void*> staging = {};  // what all_to_alls set aside; launches may still use all
  size_t staging_bytes = 0;         // of the last, the largest
};

void check_arguments(const NcclApi& nccl, int rank, int size, size_t slots,
                     const NcclConfig& limits) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw UsageError("NcclCommunicator: there is no rank " + std::to_string(rank) + " of " +
                     std::to_string(size));
  }
  if (slots == 0) throw UsageError("NcclCommunicator: needs one id at least");
  if (limits.min_ctas < 0 || limits.max_ctas < 0) {
    throw UsageError("NcclCommunicator: min_ctas and max_ctas must not be negative");
  }
  if ((limits.min_ctas > 0 || limits.max_ctas > 0) && nccl.version() < kNcclCtaLimits) {
    throw UsageError("NCCL " + nccl_version_text(nccl.version()) +
                     " knows no min_ctas and max_ctas; leave them 0 or install " +
                     nccl_version_text(kNcclCtaLimits) + " or newer");
  }
}

}  // namespace

struct NcclCommunicator::State {
  State(std::shared_ptr<NcclApi> nccl_api, std::shared_ptr<Cuda> device, int own_rank, int ranks,
        const std::vector<NcclId>& ids, const NcclOptions& chosen)
      : nccl(std::move(nccl_api)),
        cuda(std::move(device)),
        rank(own_rank),
        size(ranks),
        options(chosen),
        comms(nccl, cuda->device(), rank, ids, size, options),
        buffers(nccl, cuda, comms, options),
        window(static_cast<int>(ids.size())) {
    for (size_t i = 0; i < ids.size(); ++i) {
      const Slot& slot = slots.emplace_back(
          Slot{cuda->create_stream(true), cuda->create_event(EventKind::ordering),
               cuda->create_event(EventKind::ordering), cuda->allocate(sizeof(int32_t))});
      cuda->fill(slot.token, DType::int32, 1, 0, slot.stream);
      cuda->synchronize(slot.stream);
    }
  }

  ~State() {
    close();
    watch.reset();
    for (const Slot& slot : slots) {
      for (void* memory : slot.staging) cuda->free(memory);
      cuda->free(slot.token);
      cuda->destroy(slot.started);
      cuda->destroy(slot.done);
      cuda->destroy(slot.stream);
    }
  }

  void close();
  bool is_complete(double deadline_s);
  CudaStream enqueue(const Request& request);
  void execute(size_t index, const Request& request);
  void stage(Slot& slot, const BufferView& span, DType dtype);
  void watch_over(CudaStream stream, const Completion& done);

  const std::shared_ptr<NcclApi> nccl;
  const std::shared_ptr<Cuda> cuda;
  const int rank, size;
  const NcclOptions options;
  NcclComms comms;

  // Guards what is below, and lets launches of several threads follow one another. No completion
  // runs under it, and `abort` does without it.
  std::mutex mutex;
  NcclBuffers buffers;
  StreamWindow window;
  std::vector<Slot> slots;
  const Slot* last = nullptr;        // of the last launch
  std::optional<EventWaiter> watch;  // once a request without an order has come
};

void NcclCommunicator::State::close() {
  try {
    // Memory must not be deregistered under what still works on it.
    if (!is_complete(now_s() + options.close_timeout_s)) return comms.abort();
    if (comms.failure().empty()) buffers.clear();
  } catch (const Error&) {  // the communicators' close will find it
  }
  comms.close();
}

// Whether all that was launched is over by then; false after a failure.
bool NcclCommunicator::State::is_complete(double deadline_s) {
  for (const Slot& slot : slots) cuda->record(slot.done, slot.stream);
  for (const Slot& slot : slots) {
    while (!cuda->passed(slot.done)) {
      if (now_s() > deadline_s || !comms.failure().empty()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

// Returns the stream that it is on.
CudaStream NcclCommunicator::State::enqueue(const Request& request) {
  const StreamPlacement placement =
      window.place(payload_bytes(request), request.window_bytes, request.fence || !request.order);
  const size_t index = static_cast<size_t>(placement.slot);
  const Slot& slot = slots[index];
  if (request.order) {
    for (CudaEvent event : request.order->after) cuda->wait(slot.stream, event);
  }
  for (int before : placement.after) {
    const Slot& other = slots[static_cast<size_t>(before)];
    cuda->record(other.done, other.stream);  // nothing has been launched there since
    cuda->wait(slot.stream, other.done);
  }
  // Ops start in launch order on every rank: else two that cannot run side by side could each hold
  // the device of one rank and wait for the other rank.
  if (last && last != &slot) cuda->wait(slot.stream, last->started);
  if (request.order) cuda->record(request.order->started, slot.stream);
  cuda->record(slot.started, slot.stream);
  last = &slot;
  execute(index, request);
  if (request.order) cuda->record(request.order->done, slot.stream);
  return slot.stream;
}

void NcclCommunicator::State::execute(size_t index, const Request& request) {
  Slot& slot = slots[index];
  Request adapted = request;
  if (request.kind == Collective::barrier) {
    adapted = Request();
    adapted.dtype = DType::int32;
    adapted.recv = {{slot.token, 1}};
  } else if (payload_bytes(request) == 0) {
    return;
  }
  if (request.kind == Collective::all_to_all) {
    BufferView& send = adapted.send[0];
    const int64_t width = itemsize(request.dtype), chunk = send.count / size * width;
    if (overlap(send, adapted.recv[0], width)) {
      stage(slot, send, request.dtype);
      send.data = slot.staging.back();
    }
    const auto own = [&](const BufferView& s) {
      return static_cast<std::byte*>(s.data) + rank * chunk;
    };
    cuda->copy(own(adapted.recv[0]), own(send), static_cast<size_t>(chunk), slot.stream);
  }
  comms.call(index, options.launch_timeout_s, [&](NcclComm* comm) {
    call_nccl({*nccl, comms, comm, slot.stream, rank, size}, adapted);
  });
}

// Copies what is to be sent from memory that is received into.
void NcclCommunicator::State::stage(Slot& slot, const BufferView& span, DType dtype) {
  const size_t bytes = static_cast<size_t>(span.count * itemsize(dtype));
  if (bytes > slot.staging_bytes) {
    slot.staging.push_back(cuda->allocate(2 * bytes));
    slot.staging_bytes = 2 * bytes;
  }
  cuda->copy(slot.staging.back(), span.data, bytes, slot.stream);
}

void NcclCommunicator::State::watch_over(CudaStream stream, const Completion& done) {
  if (!watch) {
    watch.emplace(cuda, [this] { return comms.failure(); }, [this] { comms.abort(); });
  }
  watch->add(stream, done);
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclApi> nccl, std::shared_ptr<Cuda> cuda,
                                   int rank, int size, const std::vector<NcclId>& ids,
                                   const NcclOptions& options) {
  check_arguments(*nccl, rank, size, ids.size(), options.limits);
  state_ = std::make_unique<State>(std::move(nccl), std::move(cuda), rank, size, ids, options);
}

NcclCommunicator::~NcclCommunicator() = default;

int NcclCommunicator::rank() const { return state_->rank; }
int NcclCommunicator::size() const { return state_->size; }

void NcclCommunicator::launch(const Request& request, Completion done) {
  std::exception_ptr error;
  try {
    const std::string problem = nccl_problem(request, state_->size);
    if (!problem.empty()) {
      throw UsageError("rank " + std::to_string(state_->rank) + ": " + problem);
    }
    std::lock_guard lock(state_->mutex);
    const CudaStream stream = state_->enqueue(request);
    if (!request.order) return state_->watch_over(stream, done);
  } catch (...) {
    error = std::current_exception();
  }
  done(std::move(error));
}

std::string NcclCommunicator::failure() { return state_->comms.failure(); }
void NcclCommunicator::abort() { state_->comms.abort(); }

void NcclCommunicator::close() {
  std::lock_guard lock(state_->mutex);
  state_->close();
}

void* NcclCommunicator::allocate(size_t bytes) {
  std::lock_guard lock(state_->mutex);
  return state_->buffers.allocate(bytes);
}

void NcclCommunicator::free(void* memory) {
  std::lock_guard lock(state_->mutex);
  state_->buffers.free(memory);
}

void NcclCommunicator::register_buffer(void* memory, size_t bytes) {
  std::lock_guard lock(state_->mutex);
  state_->buffers.enroll(memory, bytes);
}

void NcclCommunicator::deregister_buffer(void* memory) {
  std::lock_guard lock(state_->mutex);
  state_->buffers.remove(memory);
}

}  // namespace usbyte
