// SPDX-License-Identifier: Apache-2.0
#include "staged_communicator.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/event_pool.h"
#include "staging.h"
#include "support/keep_forever.h"
#include "usbyte/error.h"
#include "usbyte/topology.h"

namespace usbyte {
namespace {

// Host memory of one chunk. Copies out of the device into it go behind `copied_in`, and the network
// behind `copied_out`, so that it is free as soon as its last copy is on its stream.
struct Buffer {
  Buffer(std::shared_ptr<Cuda> on, EventPool& events, int64_t bytes)
      : cuda(std::move(on)),
        copied_out(events.acquire(EventKind::awaited)),
        copied_in(events.acquire(EventKind::ordering)),
        over(events.acquire(EventKind::awaited)),
        memory(static_cast<std::byte*>(cuda->allocate_pinned(static_cast<size_t>(bytes)))) {}
  ~Buffer() { cuda->free_pinned(memory); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::shared_ptr<Cuda> cuda;
  const PooledEvent copied_out;
  const PooledEvent copied_in;
  const PooledEvent over;  // of a request without an order
  std::byte* const memory;
};

// A launch that is not complete.
struct Operation {
  const Request request;
  Completion done;  // of whom has taken the operation out of `open`
  const std::vector<StagedChunk> chunks;
  size_t begun = 0;    // chunks that have left for their buffer
  size_t arrived = 0;  // chunks that have left their buffer
};

struct ChunkInFlight {
  std::shared_ptr<Operation> operation;
  size_t index;
  Buffer* buffer;

  const StagedChunk& layout() const { return operation->chunks[index]; }
};

}  // namespace

// `mutex` guards what is below it and what operations count. It is never held across a call of
// `inner`, of a completion or of the device. Whoever gives the device a request's copies counts in
// `busy` and has found `broken` empty: once that is set and nobody is busy, no request's memory is
// touched but by copies that are on the streams.
struct StagedCommunicator::State : std::enable_shared_from_this<State> {
  State(std::shared_ptr<Cuda> on, Communicator& over, StagedOptions options)
      : cuda(std::move(on)),
        inner(over),
        chunk_bytes(options.chunk_bytes),
        events(cuda),
        out(cuda, true),
        in(cuda, true) {
    for (int b = 0; b < options.buffers; ++b) {
      free.push_back(&buffers.emplace_back(cuda, events, chunk_bytes));
    }
  }

  void run();
  void begin(const ChunkInFlight& chunk);
  void send(const ChunkInFlight& chunk);
  void arrive(const ChunkInFlight& chunk);
  bool copy_in(const ChunkInFlight& chunk);
  bool enter();
  void leave_locked();
  void fail(const ChunkInFlight& chunk, std::exception_ptr error);
  std::vector<std::shared_ptr<Operation>> close(const std::string& why);
  // No request's memory is touched any more, as far as that can be waited for; what was open
  // completes with an error. Returns whether the streams are empty.
  bool end(const std::string& why);
  bool quiesce();

  const std::shared_ptr<Cuda> cuda;
  Communicator& inner;  // for the thread alone, which is gone before it
  const int64_t chunk_bytes;
  EventPool events;
  const OwnedStream out;
  const OwnedStream in;
  std::deque<Buffer> buffers;  // given back with the state, when all copies are over
  std::thread thread;

  std::mutex mutex;
  std::condition_variable work;                  // for the thread
  std::condition_variable idle;                  // for the destructor: nobody is busy
  std::vector<std::shared_ptr<Operation>> open;  // not complete, in order
  std::deque<std::shared_ptr<Operation>> queue;  // of these, those with chunks that have not begun
  std::deque<Buffer*> free;
  int busy = 0;
  bool stopping = false;
  std::string broken;  // why requests fail from now on
};

bool StagedCommunicator::State::enter() {
  std::lock_guard lock(mutex);
  if (!broken.empty()) return false;
  ++busy;
  return true;
}

void StagedCommunicator::State::leave_locked() {
  if (--busy == 0) idle.notify_all();
}

// Copies out what there are buffers for before it waits for the first of them.
void StagedCommunicator::State::run() {
  std::deque<ChunkInFlight> begun;  // on their way to their buffers
  std::unique_lock lock(mutex);
  for (;;) {
    const auto can_begin = [this] { return !queue.empty() && !free.empty(); };
    work.wait(lock, [&] { return stopping || can_begin() || !begun.empty(); });
    if (stopping) return;
    if (can_begin()) {
      const std::shared_ptr<Operation> operation = queue.front();
      begun.push_back({operation, operation->begun++, free.front()});
      free.pop_front();
      if (operation->begun == operation->chunks.size()) queue.pop_front();
      lock.unlock();
      begin(begun.back());
    } else {
      const ChunkInFlight chunk = std::move(begun.front());
      begun.pop_front();
      lock.unlock();
      send(chunk);
    }
    lock.lock();
  }
}

void StagedCommunicator::State::begin(const ChunkInFlight& chunk) {
  if (!enter()) return;
  std::exception_ptr error;
  try {
    const Buffer& buffer = *chunk.buffer;
    const auto& order = chunk.operation->request.order;
    const bool first = order && chunk.index == 0;
    cuda->wait(out.get(), buffer.copied_in.get());
    if (first) {
      for (CudaEvent event : order->after) cuda->wait(out.get(), event);
      cuda->record(order->started, out.get());
    }
    for (const StagedCopy& copy : chunk.layout().out) {
      cuda->copy(buffer.memory + copy.offset, copy.device, static_cast<size_t>(copy.bytes),
                 out.get());
    }
    cuda->record(buffer.copied_out.get(), out.get());
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  {
    std::lock_guard lock(mutex);
    leave_locked();
  }
  if (error) fail(chunk, std::move(error));
}

void StagedCommunicator::State::send(const ChunkInFlight& chunk) {
  try {
    cuda->synchronize(chunk.buffer->copied_out.get());
  } catch (const std::exception&) {
    return fail(chunk, std::current_exception());
  }
  {
    std::lock_guard lock(mutex);
    if (!broken.empty()) return;
  }
  Request message;
  const Request& request = chunk.operation->request;
  message.kind = request.kind;
  message.dtype = request.dtype;
  message.reduce = request.reduce;
  message.root = request.root;
  message.scale = request.scale;
  message.schedule = request.schedule;
  message.dimension = request.dimension;
  const BufferView span{chunk.buffer->memory, chunk.layout().count};
  if (request.kind != Collective::barrier) {
    if (span.count == 0) return arrive(chunk);
    message.recv = {span};
  }
  if (request.kind == Collective::all_to_all) message.send = {span};
  inner.launch(message, [self = shared_from_this(), chunk](std::exception_ptr error) {
    if (error) {
      self->fail(chunk, std::move(error));
    } else {
      self->arrive(chunk);
    }
  });
}

void StagedCommunicator::State::arrive(const ChunkInFlight& chunk) {
  if (!enter()) return;
  bool last = false;
  std::exception_ptr error;
  try {
    last = copy_in(chunk);
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  Completion done;
  {
    std::lock_guard lock(mutex);
    leave_locked();
    free.push_back(chunk.buffer);
    if (last && std::erase(open, chunk.operation) > 0) {
      done = std::exchange(chunk.operation->done, nullptr);
    }
  }
  work.notify_one();
  if (error) return fail(chunk, std::move(error));
  if (done) done(nullptr);
}

// Whether that was the last of its operation.
bool StagedCommunicator::State::copy_in(const ChunkInFlight& chunk) {
  Operation& operation = *chunk.operation;
  const Buffer& buffer = *chunk.buffer;
  for (const StagedCopy& copy : chunk.layout().in) {
    cuda->copy(copy.device, buffer.memory + copy.offset, static_cast<size_t>(copy.bytes), in.get());
  }
  bool last;
  {
    std::lock_guard lock(mutex);
    last = ++operation.arrived == operation.chunks.size();
  }
  // Behind the copies of all chunks that were counted before, by whichever thread.
  cuda->record(buffer.copied_in.get(), in.get());
  if (last && operation.request.order) {
    cuda->record(operation.request.order->done, in.get());
  } else if (last) {
    cuda->record(buffer.over.get(), in.get());
    cuda->synchronize(buffer.over.get());
  }
  return last;
}

// The operations that were open, which are the caller's to complete.
std::vector<std::shared_ptr<Operation>> StagedCommunicator::State::close(const std::string& why) {
  std::lock_guard lock(mutex);
  if (broken.empty()) broken = why;
  queue.clear();
  return std::exchange(open, {});
}

void StagedCommunicator::State::fail(const ChunkInFlight& chunk, std::exception_ptr error) {
  const std::string why = "an earlier staged request has failed: " + what(error);
  for (const auto& operation : close(why)) {
    std::exchange(operation->done, nullptr)(
        operation == chunk.operation ? std::move(error) : std::make_exception_ptr(FaultError(why)));
  }
}

bool StagedCommunicator::State::end(const std::string& why) {
  const auto dropped = close(why);
  {
    std::unique_lock lock(mutex);
    idle.wait(lock, [&] { return busy == 0; });
  }
  const bool quiesced = quiesce();
  for (const auto& operation : dropped) {
    std::exchange(operation->done, nullptr)(std::make_exception_ptr(FaultError(why)));
  }
  return quiesced;
}

// What copies come behind may hang on the device, for ever.
bool StagedCommunicator::State::quiesce() {
  constexpr double kMost_s = 1;
  try {
    const PooledEvent event = events.acquire(EventKind::ordering);
    for (CudaStream stream : {in.get(), out.get()}) {
      cuda->record(event.get(), stream);
      if (!passes_within(*cuda, event.get(), kMost_s)) return false;
    }
  } catch (const FaultError&) {
    // Then nothing runs on the device any more.
  }
  return true;
}

StagedCommunicator::StagedCommunicator(std::shared_ptr<Cuda> cuda,
                                       std::shared_ptr<Communicator> inner, StagedOptions options)
    : inner_(std::move(inner)) {
  const int64_t least_bytes = size() * itemsize(DType::float64);
  if (options.chunk_bytes < least_bytes) {
    throw UsageError("StagedCommunicator: chunk_bytes " + std::to_string(options.chunk_bytes) +
                     " must be at least " + std::to_string(least_bytes) +
                     ", an element for each of the " + std::to_string(size()) + " ranks");
  }
  if (options.buffers < 2) {
    throw UsageError("StagedCommunicator: buffers " + std::to_string(options.buffers) +
                     " must be at least 2");
  }
  state_ = std::make_shared<State>(std::move(cuda), *inner_, options);
  state_->thread = std::thread([state = state_] { state->run(); });
}

StagedCommunicator::~StagedCommunicator() {
  State& s = *state_;
  {
    std::lock_guard lock(s.mutex);
    s.stopping = true;
    s.work.notify_one();
  }
  const bool quiesced =
      s.end("the staged communicator was destroyed before this request was complete");
  if (!quiesced) {
    // Copies that have begun would go on, and the thread waits for one of them.
    keep_forever(state_);
  }
  if (!quiesced || std::this_thread::get_id() == s.thread.get_id()) {
    s.thread.detach();  // a completion destroys this; the thread shares the state and ends
  } else {
    s.thread.join();
  }
}

void StagedCommunicator::abort() { state_->end("the staged communicator was aborted"); }

int StagedCommunicator::rank() const { return inner_->rank(); }
int StagedCommunicator::size() const { return inner_->size(); }
const Topology* StagedCommunicator::topology() const { return inner_->topology(); }

void StagedCommunicator::launch(const Request& request, Completion done) {
  int among = size(), place = rank();
  std::string problem;
  if (const Topology* mesh = topology();
      request.dimension >= 0 && mesh && request.dimension < mesh->ndim()) {
    const auto dimension = static_cast<size_t>(request.dimension);
    among = mesh->dimensions[dimension].size;
    place = mesh->coordinates(rank())[dimension];
  } else if (request.dimension >= 0) {
    problem = std::string(name(request.kind)) + " along a dimension: there is no dimension " +
              std::to_string(request.dimension);
  }
  if (problem.empty()) problem = staging_problem(request, among);
  if (!problem.empty()) return done(std::make_exception_ptr(UsageError(problem)));
  auto operation = std::make_shared<Operation>(
      Operation{request, std::move(done), stage(request, place, among, state_->chunk_bytes)});
  std::string broken;
  {
    std::lock_guard lock(state_->mutex);
    broken = state_->broken;
    if (broken.empty()) {
      state_->open.push_back(operation);
      state_->queue.push_back(operation);
      state_->work.notify_one();
    }
  }
  if (!broken.empty()) operation->done(std::make_exception_ptr(FaultError(broken)));
}

}  // namespace usbyte
