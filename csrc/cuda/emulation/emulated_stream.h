// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "usbyte/timeline.h"

// The order of an emulated device, and none beside it: what EmulatedCuda's streams and events are
// made of.
namespace usbyte::emulated {

// Set once. Orders what is before `set` before what is behind `wait`, and nothing else: a mutex, or
// std::atomic's own wait, would also order a stream's past work before the host's next call, as
// CUDA does not, and hide from ThreadSanitizer what is missing above.
class Flag {
 public:
  bool is_set() const { return word_.load(std::memory_order_acquire) != 0; }

  void set() {
    word_.store(1, std::memory_order_release);
    // Who waited may have freed the flag by now; the kernel only looks the address up.
    syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void wait() const {
    while (!is_set()) sleep(nullptr);
  }

  void wait_for(double seconds) const {
    for (const double end = now_s() + seconds; !is_set();) {
      const double left = end - now_s();
      if (left <= 0) return;
      timespec time{};
      time.tv_sec = static_cast<time_t>(left);
      time.tv_nsec = static_cast<long>((left - std::floor(left)) * 1e9);
      sleep(&time);
    }
  }

 private:
  void sleep(const timespec* most) const {
    syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, 0, most, nullptr, 0);
  }

  std::atomic<uint32_t> word_ = 0;
};

// One record of an event. Lives as long as the emulation: a reference count would order the threads
// that share it.
struct Mark {
  Flag passed;
  double time_s = 0;  // written before `passed` is set

  void pass() {
    time_s = now_s();
    passed.set();
  }
};

// A thread and its work. The list always ends in a node that is yet to be filled, for which the
// thread waits; nodes up to there are the thread's.
class Stream {
 public:
  explicit Stream(uint64_t seed) : random_(seed), thread_([this] { run(); }) {}
  ~Stream() {
    if (thread_.joinable()) thread_.join();
    while (next_) delete std::exchange(next_, next_->next);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Empty work ends the thread.
  void push(std::function<void()> work) {
    auto next = std::make_unique<Node>();
    std::lock_guard lock(mutex_);
    Node* node = last_;
    node->work = std::move(work);
    last_ = node->next = next.release();
    ++pushed_;
    node->filled.set();
  }

  bool is_complete() {
    std::lock_guard lock(mutex_);
    return finished_.load(std::memory_order_acquire) == pushed_;
  }

  // Only for work on this stream.
  double random_s(double most) { return std::uniform_real_distribution<double>(0, most)(random_); }

 private:
  struct Node {
    Flag filled;
    std::function<void()> work;
    Node* next = nullptr;
  };

  void run() {
    for (int64_t finished = 1;; ++finished) {
      const std::unique_ptr<Node> node(next_);
      node->filled.wait();
      next_ = node->next;
      if (!node->work) return;
      node->work();
      node->work = nullptr;
      finished_.store(finished, std::memory_order_release);
    }
  }

  std::mutex mutex_;  // guards the end of the list and the count; the thread never takes it
  Node* last_ = new Node;
  int64_t pushed_ = 0;
  std::atomic<int64_t> finished_ = 0;
  Node* next_ = last_;      // the thread's
  std::mt19937_64 random_;  // the thread's
  std::thread thread_;
};

}  // namespace usbyte::emulated
