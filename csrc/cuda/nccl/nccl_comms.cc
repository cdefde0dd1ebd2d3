// SPDX-License-Identifier: Apache-2.0
#include "nccl_comms.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

std::string seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", s);
  return text;
}

}  // namespace

NcclComms::NcclComms(std::shared_ptr<NcclApi> nccl, int device, int rank,
                     const std::vector<NcclId>& ids, int size, const NcclOptions& options)
    : nccl_(std::move(nccl)),
      device_(device),
      rank_(rank),
      size_(size),
      options_(options),
      comms_(ids.size()) {
  try {
    const double deadline_s = now_s() + options_.init_timeout_s;
    for (size_t slot = 0; slot < ids.size(); ++slot) make(slot, ids[slot], deadline_s);
  } catch (...) {
    abort();
    throw;
  }
}

NcclComms::~NcclComms() { close(); }

void NcclComms::make(size_t slot, const NcclId& id, double deadline_s) {
  std::unique_lock lock(mutex_);
  nccl_->with_device(device_, [&] {
    check(nccl_->comm_init(&comms_[slot], size_, id, rank_, options_.limits),
          "ncclCommInitRankConfig", nullptr);
  });
  try {
    await(lock, slot, deadline_s);
  } catch (const FaultError& e) {
    throw FaultError(std::string(e.what()) + " while connecting " + std::to_string(size_) +
                     " ranks. Likely: another rank has ended or has another number of slots; two "
                     "ranks use one GPU; a firewall, or the wrong interface (NCCL_SOCKET_IFNAME). "
                     "NCCL_DEBUG=INFO tells more");
  }
}

void NcclComms::call(size_t slot, double timeout_s, const std::function<void(NcclComm*)>& calls) {
  std::unique_lock lock(mutex_);
  if (phase_ == Phase::closed) {
    throw FaultError("rank " + std::to_string(rank_) + ": the NCCL communicators are closed");
  }
  if (phase_ != Phase::open || !failure_.empty()) throw FaultError(find_failure());
  nccl_->with_device(device_, [&] { calls(comms_[slot]); });
  await(lock, slot, now_s() + timeout_s);
}

void NcclComms::await(std::unique_lock<std::mutex>& lock, size_t slot, double deadline_s) {
  const double begin_s = now_s();
  std::chrono::duration<double> pause(10e-6);
  for (;;) {
    NcclResult state = NcclResult::success;
    check(nccl_->comm_async_error(comms_[slot], &state), "ncclCommGetAsyncError", comms_[slot]);
    if (state == NcclResult::success) return;
    if (state != NcclResult::in_progress) throw FaultError(find_failure());
    if (now_s() >= deadline_s) {
      failure_ = describe(slot) + " has made no progress for " + seconds(now_s() - begin_s);
      throw FaultError(failure_);
    }
    // A launch takes less than the shortest sleep does.
    if (now_s() - begin_s < 100e-6) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else {
      ended_.wait_for(lock, pause, [this] { return phase_ != Phase::open; });
      pause = std::min(pause * 1.5, std::chrono::duration<double>(4e-3));
    }
    if (phase_ != Phase::open) throw FaultError(find_failure());
  }
}

void NcclComms::check(NcclResult result, const char* function, NcclComm* comm) const {
  if (result == NcclResult::success || result == NcclResult::in_progress) return;
  const std::string last = nccl_->last_error(comm);
  throw FaultError("rank " + std::to_string(rank_) + ": " + function + ": " +
                   nccl_->error_string(result) + (last.empty() ? "" : " (" + last + ")"));
}

std::string NcclComms::failure() {
  std::lock_guard lock(mutex_);
  return find_failure();
}

std::string NcclComms::find_failure() {
  if (!failure_.empty() || phase_ == Phase::closed) return failure_;
  if (phase_ == Phase::aborted) {
    return "rank " + std::to_string(rank_) + ": NCCL was aborted";
  }
  for (size_t slot = 0; slot < comms_.size() && failure_.empty(); ++slot) {
    if (!comms_[slot]) continue;  // not made yet
    NcclResult state = NcclResult::success;
    const NcclResult asked = nccl_->comm_async_error(comms_[slot], &state);
    if (asked != NcclResult::success) state = asked;
    if (state == NcclResult::success || state == NcclResult::in_progress) continue;
    const std::string last = nccl_->last_error(comms_[slot]);
    failure_ = describe(slot) + " failed: " + nccl_->error_string(state) +
               (last.empty() ? "" : " (" + last + ")");
  }
  return failure_;
}

std::string NcclComms::describe(size_t slot) const {
  return "rank " + std::to_string(rank_) + ": NCCL communicator " + std::to_string(slot) + " of " +
         std::to_string(comms_.size());
}

// Each on a thread of its own.
std::shared_ptr<NcclComms::Progress> NcclComms::begin(
    std::vector<std::function<void()>> jobs) const {
  auto progress = std::make_shared<Progress>();
  progress->left = jobs.size();
  progress->deadline_s = now_s() + options_.close_timeout_s;
  for (std::function<void()>& job : jobs) {
    std::thread([job = std::move(job), progress, nccl = nccl_, device = device_] {
      try {
        nccl->with_device(device, job);
      } catch (const Error&) {  // the device is lost, and all that ran on it
      }
      std::lock_guard lock(progress->mutex);
      --progress->left;
      progress->done.notify_all();
    }).detach();
  }
  return progress;
}

// A call into NCCL may not come back once another rank is gone.
void NcclComms::await(Progress& progress) {
  const std::chrono::duration<double> left(progress.deadline_s - now_s());
  std::unique_lock lock(progress.mutex);
  progress.done.wait_for(lock, left, [&] { return progress.left == 0; });
}

void NcclComms::abort() {
  std::shared_ptr<Progress> progress;
  {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::closed) return;
    if (phase_ == Phase::open) {
      phase_ = Phase::aborted;
      ended_.notify_all();
      // All at once: an abort waits for what is on the communicator's stream, and that may wait for
      // what hangs on another one.
      std::vector<std::function<void()>> jobs;
      for (NcclComm* comm : comms_) {
        if (comm) jobs.push_back([comm, nccl = nccl_] { nccl->comm_abort(comm); });
      }
      aborting_ = begin(std::move(jobs));
    }
    progress = aborting_;
  }
  await(*progress);
}

void NcclComms::close() {
  try {
    std::unique_lock lock(mutex_);
    if (phase_ == Phase::closed) return;
    if (!find_failure().empty()) throw FaultError(find_failure());
    const double deadline_s = now_s() + options_.close_timeout_s;
    nccl_->with_device(device_, [&] {
      for (NcclComm* comm : comms_) {
        check(nccl_->comm_finalize(comm), "ncclCommFinalize", comm);
      }
    });
    for (size_t slot = 0; slot < comms_.size(); ++slot) await(lock, slot, deadline_s);
    phase_ = Phase::closed;
  } catch (const Error&) {
    return abort();
  }
  await(*begin({[comms = comms_, nccl = nccl_] {
    for (NcclComm* comm : comms) nccl->comm_destroy(comm);
  }}));
}

}  // namespace usbyte
