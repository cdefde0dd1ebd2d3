// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "usbyte/communicator.h"

namespace usbyte::test {

/// Runs `body(rank)` on one thread for each rank; an exception fails the test and names its rank.
template <typename Body>
void on_each_rank(int size, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, &body] {
      try {
        body(rank);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

/// The message of the E that `call` throws; fails the test if it throws nothing or something else.
template <typename E, typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "threw another type: " << e.what();
    return "";
  }
  ADD_FAILURE() << "threw nothing";
  return "";
}

/// A launch that has yet to complete.
class Pending {
 public:
  Pending(Communicator& communicator, const Request& request) {
    communicator.launch(request, [state = state_](std::exception_ptr error) {
      std::lock_guard lock(state->mutex);
      state->error = std::move(error);
      state->done = true;
      state->completed.notify_all();
    });
  }
  /// Waits; throws what the completion was given. Moved out, so that no two threads share the
  /// exception: its reference count is invisible to ThreadSanitizer.
  void get() {
    std::unique_lock lock(state_->mutex);
    state_->completed.wait(lock, [this] { return state_->done; });
    if (state_->error) std::rethrow_exception(std::exchange(state_->error, nullptr));
  }

 private:
  struct State {
    std::mutex mutex;  // guards the fields below
    std::condition_variable completed;
    bool done = false;
    std::exception_ptr error;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// Integers of [low, high], drawn with a seed that a failing test prints.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(static_cast<uint32_t>(seed)) {}
  int64_t operator()(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool one_in(int64_t n) { return (*this)(1, n) == 1; }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
};

}  // namespace usbyte::test
