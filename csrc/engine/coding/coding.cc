#include "coding.h"

#include <algorithm>
#include <cfenv>
#include <utility>

namespace usbyte {

namespace {

CodingSpace with_halt(CodingSpace space, Halt& halt) {
  space.halt = &halt;
  return space;
}

}  // namespace

Coding::Coding(CodingSpace space, bool encodes_first, Report encoded, Report decoded)
    : encoded_(std::move(encoded)),
      decoded_(std::move(decoded)),
      ops_(make_coded_ops(with_halt(std::move(space), halt_))),
      jobs_(Before{encodes_first}) {
  thread_ = std::thread([this] { run(); });
}

void Coding::stop() {
  halt();
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool Coding::quiesce() {
  return std::ranges::all_of(ops_, [](const auto& op) { return !op || op->quiesce(); });
}

void Coding::put(Job job) {
  MutexLock lock(mutex_);
  jobs_.insert(std::move(job));
  work_.notify_one();
}

void Coding::run() {
  std::fesetenv(FE_DFL_ENV);  // who made the thread may flush subnormals
  MutexLock lock(mutex_);
  for (;;) {
    while (!stopping_ && jobs_.empty()) work_.wait(mutex_);
    if (stopping_) return;
    const Job job = jobs_.extract(jobs_.begin()).value();
    MutexUnlock unlocked(mutex_);
    carry_out(job);
  }
}

void Coding::carry_out(const Job& job) {
  CodedOp& op = *ops_[static_cast<size_t>(job.op)];
  std::exception_ptr error;
  try {
    job.decodes ? op.decode(job.turn) : op.encode(job.turn);
  } catch (...) {
    error = std::current_exception();
  }
  (job.decodes ? decoded_ : encoded_)(job.op, error);
}

}  // namespace usbyte
