// SPDX-License-Identifier: Apache-2.0
#include "local_communicator.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "cpu_collective.h"
#include "support/thread_annotations.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

// How a call ended. Each rank gets an exception object of its own: ranks are threads, and one that
// reads the message must not share it with one that frees it.
struct Outcome {
  enum class Kind { done, usage, mismatch, fault } kind = Kind::done;
  std::string message;

  std::exception_ptr error() const {
    switch (kind) {
      case Kind::done:
        return nullptr;
      case Kind::usage:
        return std::make_exception_ptr(UsageError(message));
      case Kind::mismatch:
        return std::make_exception_ptr(MismatchError(message));
      case Kind::fault:
        break;
    }
    return std::make_exception_ptr(FaultError(message));
  }
};

Outcome attempt(const std::string& call, const std::vector<const Request*>& ranks) {
  for (size_t r = 1; r < ranks.size(); ++r) {
    const std::string what = difference(*ranks[r], *ranks[0]);
    if (what.empty()) continue;
    return {Outcome::Kind::mismatch,
            "ranks disagree about " + call + ": rank " + std::to_string(r) +
                " differs from rank 0 in " + what +
                "; every rank must launch the same collectives in the same order"};
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    const std::string what = problem(*ranks[r], static_cast<int>(ranks.size()));
    if (!what.empty()) return {Outcome::Kind::usage, "rank " + std::to_string(r) + ": " + what};
  }
  try {
    execute(ranks);
  } catch (const std::exception& e) {
    return {Outcome::Kind::fault, call + " failed: " + e.what()};
  }
  return {};
}

// Where the ranks meet. `mutex_` is never held while a completion runs. A call belongs to `open_`
// until all ranks have posted it or one of them has left; from then on the hub's thread alone owns
// it.
class Hub {
 public:
  Hub(int size, AlphaBeta cost) : size_(size), cost_(cost), next_(ranks()), outstanding_(ranks()) {}

  // The thread shares ownership, because the last communicator may be destroyed by a completion.
  static std::shared_ptr<Hub> start(int size, AlphaBeta cost) {
    auto hub = std::make_shared<Hub>(size, cost);
    hub->thread_ = std::thread([hub] { hub->run(); });
    return hub;
  }

  int size() const { return size_; }

  void post(int rank, const Request& request, Completion done) {
    const size_t r = static_cast<size_t>(rank);
    Outcome outcome;
    {
      MutexLock lock(mutex_);
      if (left_ < 0) return enqueue(r, {request, std::move(done)});
      outcome = abandoned(next_[r]++, request.kind);
    }
    done(outcome.error());
  }

  // After this, nothing of `rank` is touched or called, unless a completion called it: then what is
  // outstanding fails right after that completion.
  void leave(int rank) {
    bool last = false;
    {
      MutexLock lock(mutex_);
      const bool from_completion = std::this_thread::get_id() == thread_.get_id();
      if (left_ < 0) left_ = rank;
      last = --members_ == 0;
      work_.notify_one();
      if (from_completion) {
        if (last) thread_.detach();
        return;
      }
      while (outstanding_[static_cast<size_t>(rank)] > 0) idle_.wait(mutex_);
    }
    if (last) thread_.join();
  }

 private:
  Mutex mutex_;

  struct Posted {
    Request request;
    Completion done;  // empty: this rank has not posted
  };
  struct Call {
    std::vector<Posted> posted;  // by rank
    int count = 0;
    double posted_s = 0;  // when the last rank posted
  };

  size_t ranks() const { return static_cast<size_t>(size_); }

  void enqueue(size_t rank, Posted posted) USBYTE_REQUIRES(mutex_) {
    const size_t index = static_cast<size_t>(next_[rank]++ - first_);
    if (index == open_.size()) open_.push_back({std::vector<Posted>(ranks())});
    Call& call = open_[index];
    call.posted[rank] = std::move(posted);
    ++outstanding_[rank];
    if (++call.count == size_) {
      call.posted_s = now_s();
      work_.notify_one();
    }
  }

  static std::string describe(int64_t sequence, Collective kind) {
    return "call " + std::to_string(sequence) + " (" + std::string(name(kind)) + ")";
  }

  Outcome abandoned(int64_t sequence, Collective kind) const USBYTE_REQUIRES(mutex_) {
    return {Outcome::Kind::fault, describe(sequence, kind) + " cannot complete: rank " +
                                      std::to_string(left_) +
                                      " has destroyed its local communicator; keep every rank's "
                                      "until the calls of all ranks have completed"};
  }

  void run() {
    MutexLock lock(mutex_);
    for (;;) {
      while (open_.empty() ? members_ > 0 : left_ < 0 && open_.front().count < size_) {
        work_.wait(mutex_);
      }
      if (open_.empty()) return;
      Call call = std::move(open_.front());
      open_.pop_front();
      const int64_t sequence = first_++;
      finish(sequence, call);
    }
  }

  void finish(int64_t sequence, Call& call) USBYTE_REQUIRES(mutex_) {
    std::vector<const Request*> requests;
    std::vector<size_t> posted;  // ranks
    for (size_t r = 0; r < ranks(); ++r) {
      if (!call.posted[r].done) continue;
      requests.push_back(&call.posted[r].request);
      posted.push_back(r);
    }
    const Request& first = *requests.front();
    Outcome outcome;
    if (left_ < 0) {
      {
        MutexUnlock unlocked(mutex_);
        outcome = attempt(describe(sequence, first.kind), requests);
      }
      if (outcome.kind == Outcome::Kind::done) await_network(call.posted_s, first);
      // The data has moved, but the emulated transfer was cut off.
      if (left_ >= 0 && now_s() < channel_free_s_) outcome = abandoned(sequence, first.kind);
    } else {
      outcome = abandoned(sequence, first.kind);
    }
    {
      MutexUnlock unlocked(mutex_);
      // What a completion holds is released here too: it may be a communicator, which then leaves.
      for (size_t r : posted) std::exchange(call.posted[r].done, nullptr)(outcome.error());
    }
    for (size_t r : posted) --outstanding_[r];
    idle_.notify_all();
  }

  // Startups run side by side, transfers take turns; bytes travel during the end of a startup.
  void await_network(double posted_s, const Request& request) USBYTE_REQUIRES(mutex_) {
    if (cost_.alpha_s == 0 && cost_.beta_s_per_byte == 0) return;
    channel_free_s_ = std::max(channel_free_s_, posted_s + cost_.latency_s()) +
                      cost_.beta_s_per_byte * static_cast<double>(payload_bytes(request));
    const std::chrono::duration<double> until(std::max(channel_free_s_, posted_s + cost_.alpha_s));
    const auto deadline = std::chrono::steady_clock::time_point(
        std::chrono::ceil<std::chrono::steady_clock::duration>(until));
    while (left_ < 0) {
      if (work_.wait_until(mutex_, deadline) == std::cv_status::timeout) break;
    }
  }

  const int size_;
  const AlphaBeta cost_;
  std::thread thread_;  // written before any rank exists, then only by the last to leave

  ConditionVariable work_;  // for the hub's thread: a call is complete, or a rank left
  ConditionVariable idle_;  // for leave: a call has completed
  int members_ USBYTE_GUARDED_BY(mutex_) = size_;  // communicators alive
  int left_ USBYTE_GUARDED_BY(mutex_) = -1;        // first rank that left; its absence is final
  std::deque<Call> open_ USBYTE_GUARDED_BY(mutex_);
  int64_t first_ USBYTE_GUARDED_BY(mutex_) = 0;  // sequence number of open_.front()
  // By rank: sequence number of its next call; calls posted whose completion has not returned.
  std::vector<int64_t> next_ USBYTE_GUARDED_BY(mutex_);
  std::vector<int> outstanding_ USBYTE_GUARDED_BY(mutex_);
  // When the emulated network ends its last transfer.
  double channel_free_s_ USBYTE_GUARDED_BY(mutex_) = 0;
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(int rank, std::shared_ptr<Hub> hub) : rank_(rank), hub_(std::move(hub)) {}
  ~LocalCommunicator() override { hub_->leave(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  void launch(const Request& request, Completion done) override {
    hub_->post(rank_, request, std::move(done));
  }

 private:
  const int rank_;
  const std::shared_ptr<Hub> hub_;
};

// A single rank needs nobody: calls complete in launch.
class SoloCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void launch(const Request& request, Completion done) override {
    done(attempt(std::string(name(request.kind)), {&request}).error());
  }
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_local_communicators(int size, AlphaBeta cost) {
  if (size < 1) {
    throw UsageError("make_local_communicators: size " + std::to_string(size) +
                     " must be at least 1");
  }
  cost.validate("make_local_communicators");
  std::vector<std::unique_ptr<Communicator>> out;
  if (size == 1) {
    out.push_back(std::make_unique<SoloCommunicator>());
    return out;
  }
  const std::shared_ptr<Hub> hub = Hub::start(size, cost);
  for (int r = 0; r < size; ++r) out.push_back(std::make_unique<LocalCommunicator>(r, hub));
  return out;
}

}  // namespace usbyte
