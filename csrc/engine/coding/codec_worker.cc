// SPDX-License-Identifier: Apache-2.0
#include "codec_worker.h"

#include <algorithm>
#include <cfenv>
#include <utility>

namespace usbyte {

namespace {

CodingSpace with_cancellation(CodingSpace space, CancellationToken& cancellation) {
  space.cancellation = &cancellation;
  return space;
}

}  // namespace

CodecWorker::CodecWorker(CodingSpace space, bool encodes_first, Callback encoded, Callback decoded)
    : encoded_(std::move(encoded)),
      decoded_(std::move(decoded)),
      ops_(make_coded_ops(with_cancellation(std::move(space), cancellation_))),
      tasks_(Before{encodes_first}) {
  thread_ = std::thread([this] { run(); });
}

void CodecWorker::stop() {
  cancel();
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool CodecWorker::quiesce() {
  return std::ranges::all_of(ops_, [](const auto& op) { return !op || op->quiesce(); });
}

void CodecWorker::put(Task task) {
  MutexLock lock(mutex_);
  tasks_.insert(std::move(task));
  work_.notify_one();
}

void CodecWorker::run() {
  std::fesetenv(FE_DFL_ENV);  // who made the thread may flush subnormals
  MutexLock lock(mutex_);
  for (;;) {
    while (!stopping_ && tasks_.empty()) work_.wait(mutex_);
    if (stopping_) return;
    const Task task = tasks_.extract(tasks_.begin()).value();
    MutexUnlock unlocked(mutex_);
    execute(task);
  }
}

void CodecWorker::execute(const Task& task) {
  CodedOp& op = *ops_[static_cast<size_t>(task.op)];
  std::exception_ptr error;
  try {
    task.decodes ? op.decode(task.context) : op.encode(task.context);
  } catch (...) {
    error = std::current_exception();
  }
  (task.decodes ? decoded_ : encoded_)(task.op, error);
}

}  // namespace usbyte
