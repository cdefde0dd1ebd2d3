// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.h"
#include "usbyte/communicator.h"
#include "usbyte/plan.h"

// Communicators that let a test watch the engine, or decide when an op completes.
namespace usbyte::test {

/// Launches complete when the test says so.
class ManualCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void launch(const Request& request, Completion done) override {
    std::lock_guard lock(mutex_);
    kinds_.push_back(request.kind);
    pending_.emplace(launched_++, std::move(done));
    launcher_ = std::this_thread::get_id();
    changed_.notify_all();
  }

  int launched() const {
    std::lock_guard lock(mutex_);
    return launched_;
  }
  std::thread::id last_launcher() const {
    std::lock_guard lock(mutex_);
    return launcher_;
  }
  std::vector<Collective> kinds() const {
    std::lock_guard lock(mutex_);
    return kinds_;
  }
  /// False if there are still fewer than `count` launches after 20 s.
  bool await_launches(int count) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return launched_ >= count; });
  }
  /// Completes launch number `index`, counted over all steps.
  void complete(int index, std::exception_ptr error = nullptr) {
    std::unique_lock lock(mutex_);
    const Completion done = std::move(pending_.at(index));
    pending_.erase(index);
    lock.unlock();
    done(std::move(error));
  }

 private:
  mutable std::mutex mutex_;  // guards the fields below
  mutable std::condition_variable changed_;
  std::map<int, Completion> pending_;
  int launched_ = 0;
  std::vector<Collective> kinds_;  // by launch
  std::thread::id launcher_;
};

/// Passes completions on from a thread of its own, late and in random order.
class LateCommunicator final : public Communicator {
 public:
  LateCommunicator(Communicator& inner, uint64_t seed)
      : inner_(inner), random_(seed), thread_([this] { run(); }) {}
  ~LateCommunicator() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void launch(const Request& request, Completion done) override {
    inner_.launch(request, [this, done = std::move(done)](std::exception_ptr error) {
      std::lock_guard lock(mutex_);
      completed_.emplace_back(done, std::move(error));
      changed_.notify_one();
    });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !completed_.empty(); });
      if (completed_.empty()) return;
      const auto delay = std::chrono::microseconds(random_(0, 150));
      lock.unlock();
      std::this_thread::sleep_for(delay);  // more may complete meanwhile
      lock.lock();
      const auto last = static_cast<int64_t>(completed_.size()) - 1;
      std::swap(completed_[static_cast<size_t>(random_(0, last))], completed_.back());
      auto [done, error] = std::move(completed_.back());
      completed_.pop_back();
      lock.unlock();
      done(std::move(error));
      lock.lock();
    }
  }

  Communicator& inner_;
  std::mutex mutex_;  // guards the fields below
  std::condition_variable changed_;
  Random random_;
  std::vector<std::pair<Completion, std::exception_ptr>> completed_;
  bool stopping_ = false;
  std::thread thread_;
};

/// Checks each launch against the rules of the plan: order, readiness, window, fence. The test
/// reports what it tells the engine, before it does so.
class RuleChecker final : public Communicator {
 public:
  RuleChecker(const Plan& plan, const std::byte* flat_buffer, Communicator& inner)
      : plan_(plan), flat_buffer_(flat_buffer), inner_(inner), next_(plan.ops().size()) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }

  void begin_step() {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(next_, plan_.ops().size()) << "a step began before all ops were launched";
    EXPECT_EQ(ops_in_flight_, 0) << "a step began with ops in flight";
    next_ = 0;
    ready_.clear();
    scattered_.clear();
  }
  void ready(int tensor) {
    std::lock_guard lock(mutex_);
    ready_.insert(tensor);
  }

  void launch(const Request& request, Completion done) override {
    const Op* op = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (next_ < plan_.ops().size()) op = &plan_.ops()[next_++];
      if (op) check(request, *op);
    }
    ASSERT_NE(op, nullptr) << "an op was launched outside a step";
    inner_.launch(request, [this, op, done = std::move(done)](std::exception_ptr error) {
      {
        // Before the engine knows, so that what is in flight here is never more than it thinks.
        std::lock_guard lock(mutex_);
        --ops_in_flight_;
        bytes_in_flight_ -= plan_.bytes(*op);
        if (op->kind == Collective::reduce_scatter) {
          scattered_.insert(op->blocks.begin(), op->blocks.end());
        }
      }
      done(std::move(error));
    });
  }

 private:
  void check(const Request& request, const Op& op) {
    const std::string what = plan_.describe(static_cast<int>(next_ - 1));
    EXPECT_EQ(request.kind, op.kind) << what;
    EXPECT_EQ(request.dtype, plan_.dtype(op.blocks[0])) << what;
    ASSERT_EQ(request.recv.size(), op.blocks.size()) << what;
    for (size_t i = 0; i < op.blocks.size(); ++i) {
      EXPECT_EQ(request.recv[i].data, flat_buffer_ + plan_.byte_offset(op.blocks[i].begin)) << what;
      EXPECT_EQ(request.recv[i].count, op.blocks[i].numel()) << what;
      if (op.kind == Collective::all_gather) {
        EXPECT_TRUE(scattered_.contains(op.blocks[i])) << what << " before its reduce_scatter";
      }
    }
    for (int tensor : plan_.tensors_of(op)) EXPECT_TRUE(ready_.contains(tensor)) << what;
    if (ops_in_flight_ > 0) {
      EXPECT_FALSE(op.fence) << what << " passed its fence";
      EXPECT_LE(bytes_in_flight_ + plan_.bytes(op), op.window_bytes) << what;
    }
    ++ops_in_flight_;
    bytes_in_flight_ += plan_.bytes(op);
  }

  const Plan& plan_;
  const std::byte* flat_buffer_;
  Communicator& inner_;
  std::mutex mutex_;  // guards the fields below
  size_t next_;
  std::set<int> ready_;
  std::set<Block> scattered_;
  int ops_in_flight_ = 0;
  int64_t bytes_in_flight_ = 0;
};

}  // namespace usbyte::test
