// SPDX-License-Identifier: Apache-2.0
#include "usbyte/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/local_communicator.h"
#include "engine_rig.h"
#include "support/half.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using test::kUnlimited;
using test::message_of;
using test::on_each_rank;
using test::plan_of;
using test::Rig;

TEST(EngineStep, RunsFromReadyToDrained) {
  Rig rig(plan_of(2));
  rig->drain();
  rig->wait(1);
  EXPECT_EQ(rig->steps(), 0);
  rig->begin_step();
  EXPECT_EQ(rig->steps(), 1);
  EXPECT_EQ(rig->unready(), (std::vector<int>{0, 1}));
  const double before = now_s();
  rig->ready(1);
  EXPECT_EQ(rig->unready(), std::vector<int>{0});
  EXPECT_EQ(rig->ready_times()[0], 0);
  EXPECT_GE(rig->ready_times()[1], before);
  EXPECT_EQ(rig.communicator.launched(), 0) << "op 0 is first in the plan";
  rig->ready(0);
  rig->end_backward();
  rig.complete(1);
  rig->wait(1);
  EXPECT_GT(rig->op_times()[1].second, 0);
  EXPECT_EQ(rig->op_times()[0].second, 0);
  rig.complete(0);
  rig->wait(0);
  rig->drain();
  ASSERT_EQ(rig->op_times().size(), 2U);
  for (auto [launched, done] : rig->op_times()) EXPECT_GE(done, launched);
  EXPECT_EQ(rig->fault(), "");
}

template <typename T>
void expect_scaled_gradients(DType dtype, T (*make)(double)) {
  constexpr double kScale = 1.0 / 3;
  EngineOptions options;
  options.scale = kScale;
  const Plan plan("test", {{"a", 5, dtype, 0}, {"b", 3, dtype, 5}},
                  {{Collective::all_reduce, {{0, 8}}, kUnlimited, false}});
  Rig rig(plan, options);
  T* const flat_buffer = reinterpret_cast<T*>(rig.flat_buffer.data());
  const auto product = [&](double x) {
    return std::is_same_v<T, double> ? make(x * kScale)
                                     : make(static_cast<float>(x) * static_cast<float>(kScale));
  };
  std::vector<T> elsewhere;
  for (int i = 0; i < 5; ++i) elsewhere.push_back(make(0.75 * i - 1));
  for (int i = 5; i < 8; ++i) flat_buffer[i] = make(i);
  rig->begin_step();
  EXPECT_TRUE(rig->ready(0, {}, elsewhere.data()).empty());
  rig->ready(1, {}, flat_buffer + 5);
  rig->end_backward();
  std::vector<T> expected;
  for (int i = 0; i < 5; ++i) expected.push_back(product(0.75 * i - 1));
  for (int i = 5; i < 8; ++i) expected.push_back(product(i));
  EXPECT_EQ(std::memcmp(flat_buffer, expected.data(), expected.size() * sizeof(T)), 0)
      << name(dtype);
  rig.complete(0);
  rig->drain();
}

TEST(EngineStep, GradientsElsewhereAreTakenScaled) {
  expect_scaled_gradients<float>(DType::float32, [](double x) { return static_cast<float>(x); });
  expect_scaled_gradients<double>(DType::float64, [](double x) { return x; });
  expect_scaled_gradients<Half>(DType::float16,
                                [](double x) { return from_float<Half>(static_cast<float>(x)); });
  expect_scaled_gradients<BFloat16>(
      DType::bfloat16, [](double x) { return from_float<BFloat16>(static_cast<float>(x)); });
}

TEST(EngineStep, APlanWithoutTensorsIsDrainedAtOnce) {
  Rig rig(Plan("test", {}, {}));
  for (int i = 0; i < 3; ++i) {
    rig.backward();
    rig->drain();
  }
  EXPECT_EQ(rig->steps(), 3);
}

TEST(EngineStep, NumberingGoesOnFromAnEarlierEngine) {
  EngineOptions options;
  options.steps_before = 7;
  Rig rig(plan_of(1), options);
  EXPECT_EQ(rig->steps(), 7);
  rig->drain();
  rig.backward();
  EXPECT_EQ(rig->steps(), 8);
  rig.fail_op(0, "lost");
  EXPECT_NE(message_of<FaultError>([&] { rig->drain(); }).find("step 8"), std::string::npos);
}

TEST(EngineStep, StatusTellsOtherRanksWhereThisOneIs) {
  Rig rig(plan_of(6, 1));
  const auto status = [&] { return json::parse(rig->status()); };
  EXPECT_EQ(status().at("step"), 0);
  EXPECT_EQ(status().at("phase"), "idle");
  rig->begin_step();
  rig->ready(0);
  ASSERT_TRUE(rig.communicator.await_launches(1));
  json first = status();
  EXPECT_EQ(first.at("last").size(), 1);
  EXPECT_EQ(first["last"][0].at("step"), 1);
  EXPECT_NE(first["last"][0].at("op").get<std::string>().find(": a)"), std::string::npos);
  EXPECT_GE(first["last"][0].at("launched_s"), 0);
  EXPECT_TRUE(first["last"][0].at("took_s").is_null());
  first.erase("last");
  EXPECT_EQ(first, json({{"step", 1},
                         {"phase", "backward"},
                         {"launched", 1},
                         {"completed", 0},
                         {"ops", 6},
                         {"awaited", {"b", "c", "d", "e"}},
                         {"awaits_release", false},
                         {"open_step", 0}}));
  for (int t = 1; t < 6; ++t) rig->ready(t);
  rig->end_backward();
  rig.complete(0);
  ASSERT_TRUE(rig.communicator.await_launches(2));
  EXPECT_EQ(status().at("phase"), "flight");
  EXPECT_EQ(status().at("completed"), 1);
  EXPECT_EQ(status().at("awaited"), json::array());
  EXPECT_GE(status().at("last").at(0).at("took_s"), 0);
  EXPECT_TRUE(status().at("last").at(1).at("took_s").is_null());
  for (int op = 1; op < 6; ++op) rig.complete(op);
  rig->drain();
  EXPECT_EQ(status().at("phase"), "idle");
  for (int step = 2; step < 5; ++step) {
    rig.backward();
    for (int op = 0; op < 6; ++op) rig.complete(6 * (step - 1) + op);
    rig->drain();
  }
  EXPECT_EQ(status().at("last").size(), 16);  // of 24
  EXPECT_EQ(status().at("last").back().at("step"), 4);
}

TEST(EngineStep, StatusTellsWhetherGathersAreHeld) {
  EngineOptions options;
  options.hold_gathers = true;
  Rig rig(plan_of(1).with_ops("test", {{Collective::reduce_scatter, {{0, 4}}, kUnlimited, false},
                                       {Collective::all_gather, {{0, 4}}, kUnlimited, false}}),
          options);
  const auto awaits_release = [&] {
    return json::parse(rig->status()).at("awaits_release").get<bool>();
  };
  EXPECT_FALSE(awaits_release());
  rig.backward();
  EXPECT_FALSE(awaits_release());
  rig.complete(0);
  rig->wait_reduced();
  EXPECT_TRUE(awaits_release());
  rig->release_gathers();
  EXPECT_FALSE(awaits_release());
  rig.complete(1);
  rig->drain();
}

TEST(EngineUse, WrongCallsAreUsageErrorsThatNameTheTensor) {
  Rig rig(plan_of(3));
  EXPECT_THROW(rig->ready(0), UsageError) << "before begin_step";
  EXPECT_THROW(rig->end_backward(), UsageError) << "before begin_step";
  rig->begin_step();
  EXPECT_THROW(rig->begin_step(), UsageError) << "backward is open";
  for (int outside : {-1, 3}) {
    const std::string text = std::to_string(outside);
    EXPECT_NE(message_of<UsageError>([&] { rig->ready(outside); }).find(text), std::string::npos);
    EXPECT_NE(message_of<UsageError>([&] { rig->wait(outside); }).find(text), std::string::npos);
    EXPECT_THROW(rig->record_update({outside}, 0, 1), UsageError);
  }
  rig->ready(0);
  EXPECT_NE(message_of<UsageError>([&] { rig->ready(0); }).find("'a'"), std::string::npos);
  rig->ready(2);
  EXPECT_NE(message_of<UsageError>([&] { rig->end_backward(); }).find("'b'"), std::string::npos);
  rig->ready(1);
  rig->end_backward();
  EXPECT_THROW(rig->end_backward(), UsageError) << "backward is closed";
  EXPECT_THROW(rig->ready(1), UsageError) << "backward is closed";
  rig.complete(0);
  EXPECT_THROW(rig->begin_step(), UsageError) << "ops are in flight";
  rig.complete(1);
  rig.complete(2);
  rig->drain();
  rig->begin_step();  // none of this was a fault
  EXPECT_EQ(rig->steps(), 2);
}

TEST(EngineWait, PollRunsWhileWaitingAndMayEndTheWait) {
  Rig rig(plan_of(1));
  rig.backward();
  int polls = 0;
  const auto interrupt = [&] {
    EXPECT_EQ(rig->steps(), 1) << "no lock is held";
    if (++polls == 2) throw std::runtime_error("interrupted");
  };
  EXPECT_THROW(rig->wait(0, interrupt), std::runtime_error);
  polls = 0;
  EXPECT_THROW(rig->drain(interrupt), std::runtime_error);
  rig.complete(0);
  rig->wait(0, [] { ADD_FAILURE() << "polled although it has arrived"; });
}

// Otherwise Ctrl-C has no effect while gradients keep arriving.
TEST(EngineWait, PollRunsWhileOtherTensorsArrive) {
  constexpr int kTensors = 20;
  Rig rig(plan_of(kTensors));
  int polls = 0;
  for (int step = 0; step < 20 && polls < 2; ++step) {  // a busy machine may wake nobody in time
    rig.backward();
    std::thread network([&] {
      for (int op = 0; op < kTensors; ++op) {
        std::this_thread::sleep_for(milliseconds(30));
        rig.complete(kTensors * step + op);
      }
    });
    rig->wait(kTensors - 1, [&] { ++polls; });
    network.join();
    rig->drain();
  }
  EXPECT_GE(polls, 2);
}

// Launches of op 0 complete when the test says so. That of op 1 takes a while, and tells whether
// who waited for op 0 went on before its end.
class SlowSecondLaunch final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void launch(const Request&, Completion done) override {
    if (launched_++ % 2 == 0) {
      std::lock_guard lock(mutex_);
      first_ = std::move(done);
      return;
    }
    std::this_thread::sleep_for(milliseconds(20));
    if (went_on && polls == polls_before) ++too_early;
    done(nullptr);
  }
  void complete_first() {
    std::unique_lock lock(mutex_);
    const Completion done = std::exchange(first_, {});
    lock.unlock();
    polls_before = polls.load();
    done(nullptr);
  }

  std::atomic<bool> went_on = false;
  std::atomic<int> too_early = 0;
  std::atomic<int> polls = 0;  // of who waits, which looks by itself then
  std::atomic<int> polls_before = 0;

 private:
  std::mutex mutex_;  // guards first_
  Completion first_;
  int launched_ = 0;  // by one thread at a time
};

TEST(EngineWait, IsWokenOnceTheNextOpIsLaunched) {
  const Plan plan = plan_of(2, 1);
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  SlowSecondLaunch communicator;
  Engine engine(plan, flat_buffer.data(), communicator);
  for (int step = 0; step < 10; ++step) {
    communicator.went_on = false;
    engine.begin_step();
    for (int t : {0, 1}) engine.ready(t);
    engine.end_backward();
    std::atomic<bool> waiting = false;
    std::thread waiter([&] {
      engine.wait(0, [&] {
        ++communicator.polls;
        waiting = true;
      });
      communicator.went_on = true;
    });
    while (!waiting) std::this_thread::sleep_for(milliseconds(1));
    communicator.complete_first();
    waiter.join();
    engine.drain();
  }
  // Whose poll came just then did not have to be woken.
  EXPECT_LE(communicator.too_early, 3);
}

// Another thread would have to be woken, and wait for a core, or for Python's lock.
TEST(EngineWait, GoesOnHoweverLongAStallMayTake) {
  EngineOptions options;
  options.stall_warning_s = options.stall_limit_s = 1e300;
  Rig rig(plan_of(3), options);
  for (int step = 0; step < 20; ++step) {
    rig.backward();
    for (int op = 0; op < 3; ++op) rig.complete(3 * step + op);
    rig->drain();
  }
  EXPECT_EQ(rig->fault(), "");
}

TEST(EngineLaunch, IsUpToTheThreadThatReportsAnEnd) {
  Rig rig(plan_of(2, 1));
  int at_once = 0;
  for (int step = 0; step < 10; ++step) {
    rig.backward();
    ASSERT_TRUE(rig.communicator.await_launches(2 * step + 1));
    std::this_thread::sleep_for(milliseconds(5));  // the engine's thread goes to sleep
    rig.complete(2 * step);
    at_once += rig.communicator.last_launcher() == std::this_thread::get_id();
    rig.complete(2 * step + 1);
    rig->drain();
  }
  EXPECT_GE(at_once, 1);
}

// The ranks may have come to different tensors when backward is abandoned; what one rank goes on to
// launch, another never would.
TEST(EngineEnd, InsideBackwardWaitsForOpsInFlightAndLaunchesNoMore) {
  Rig rig(plan_of(3, 1));
  rig->begin_step();
  rig->ready(0);
  rig->ready(1);
  ASSERT_TRUE(rig.communicator.await_launches(1));
  std::atomic<bool> ended = false;
  std::thread owner([&] {
    rig.engine.reset();
    ended = true;
  });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(ended);
  rig.complete(0);
  owner.join();
  EXPECT_EQ(rig.communicator.launched(), 1);
}

// Other ranks count on the ops of a step whose backward is closed.
TEST(EngineEnd, AfterBackwardFinishesTheStep) {
  Rig rig(plan_of(3, 1));
  rig.backward();
  std::thread owner([&] { rig.engine.reset(); });
  for (int op = 0; op < 3; ++op) rig.complete(op);
  owner.join();
}

TEST(EngineEnd, AFailedEngineDoesNotWaitAndLateCompletionsAreHarmless) {
  Rig rig(plan_of(2));
  rig.backward();
  ASSERT_TRUE(rig.communicator.await_launches(2));
  rig->fail("another rank is lost");
  rig.engine.reset();
  rig.complete(0);
  rig.fail_op(1, "connection reset");
}

// Who reports the end of the first op launches the second, which takes until the test lets it.
class HeldSecondLaunch final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void launch(const Request&, Completion done) override {
    std::unique_lock lock(mutex_);
    done_.push_back(std::move(done));
    changed_.notify_all();
    if (done_.size() == 2) changed_.wait(lock, [&] { return released_; });
    if (done_.size() == 2) left_ = true;
  }
  bool await_launches(size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return done_.size() >= count; });
  }
  void complete_first() {
    std::unique_lock lock(mutex_);
    const Completion done = done_.front();
    lock.unlock();
    done(nullptr);
  }
  void release() {
    std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  bool left() const {
    std::lock_guard lock(mutex_);
    return left_;
  }

 private:
  mutable std::mutex mutex_;  // guards the fields below
  std::condition_variable changed_;
  std::vector<Completion> done_;
  bool released_ = false, left_ = false;
};

TEST(EngineEnd, AFailedEngineWaitsForWhoIsLaunching) {
  const Plan plan = plan_of(2, 1);
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  HeldSecondLaunch communicator;
  auto engine = std::make_unique<Engine>(plan, flat_buffer.data(), communicator);
  engine->begin_step();
  for (int t : {0, 1}) engine->ready(t);
  engine->end_backward();
  ASSERT_TRUE(communicator.await_launches(1));
  std::this_thread::sleep_for(milliseconds(5));  // the engine's thread goes to sleep
  std::thread network([&] { communicator.complete_first(); });
  ASSERT_TRUE(communicator.await_launches(2));
  engine->fail("another rank is lost");
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));
    communicator.release();
  });
  engine.reset();
  EXPECT_TRUE(communicator.left());
  network.join();
  other.join();
}

TEST(EngineEnd, MayComeAtAnyMoment) {
  for (int i = 0; i < 200; ++i) {
    auto ranks = make_local_communicators(2);
    on_each_rank(2, [&](int rank) {
      const Plan plan = plan_of(5, i % 2 ? 1 : kUnlimited);
      std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
      Engine engine(plan, flat_buffer.data(), *ranks[static_cast<size_t>(rank)]);
      engine.begin_step();
      // The ranks stop at the same tensor: what one has launched, the other launches too.
      for (int t = 0; t < i % 6; ++t) engine.ready(t);
      for (int t = 0; t < i % 6; ++t) engine.wait(t);
    });
  }
}

}  // namespace
}  // namespace usbyte
