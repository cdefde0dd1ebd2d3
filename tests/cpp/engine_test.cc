#include "usbyte/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "communicators.h"
#include "usbyte/error.h"
#include "usbyte/local_communicator.h"

namespace usbyte {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using test::ManualCommunicator;
using test::message_of;
using test::on_each_rank;

constexpr int64_t kUnlimited = 1 << 20;

// Tensors "a", "b", ... of 4 float32 elements, each all-reduced by itself, in order.
Plan plan_of(int tensors, int64_t window_bytes = kUnlimited) {
  std::vector<TensorSpec> specs;
  std::vector<Op> ops;
  for (int t = 0; t < tensors; ++t) {
    specs.push_back({std::string(1, static_cast<char>('a' + t)), 4, DType::float32, 4 * t});
    ops.push_back({Collective::all_reduce, {{4 * t, 4 * t + 4}}, window_bytes, false});
  }
  return Plan("test", specs, ops);
}

// An engine whose ops complete when the test says so.
struct Rig {
  explicit Rig(Plan plan, EngineOptions options = {})
      : arena(static_cast<size_t>(plan.arena_bytes())),
        engine(std::make_unique<Engine>(std::move(plan), arena.data(), communicator,
                                        std::move(options))) {}

  Engine* operator->() const { return engine.get(); }
  void backward() {
    engine->begin_step();
    for (int tensor : engine->unready()) engine->ready(tensor);
    engine->end_backward();
  }
  // Waits for the launch, since the engine launches on its own thread.
  void complete(int index, std::exception_ptr error = nullptr) {
    ASSERT_TRUE(communicator.await_launches(index + 1));
    communicator.complete(index, std::move(error));
  }
  void fail_op(int index, const char* why) {
    complete(index, std::make_exception_ptr(std::runtime_error(why)));
  }

  ManualCommunicator communicator;
  std::vector<std::byte> arena;
  std::unique_ptr<Engine> engine;
};

void expect_every_call_throws(Engine& engine, const std::string& text) {
  const std::vector<std::function<void()>> calls = {
      [&] { engine.begin_step(); }, [&] { engine.ready(0); }, [&] { engine.end_backward(); },
      [&] { engine.wait(0); }, [&] { engine.drain(); }};
  for (const auto& call : calls) EXPECT_EQ(message_of<FaultError>(call), text);
  EXPECT_EQ(engine.fault(), text);
}

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
  EXPECT_EQ(rig->samples().size(), 1U);
  rig.complete(0);
  rig->wait(0);
  rig->drain();
  ASSERT_EQ(rig->samples().size(), 2U);
  EXPECT_EQ(rig->samples()[0].bytes, 16);
  EXPECT_GE(rig->samples()[0].seconds, 0);
  EXPECT_EQ(rig->fault(), "");
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
  EXPECT_EQ(status(), json({{"step", 1},
                            {"phase", "backward"},
                            {"launched", 1},
                            {"completed", 0},
                            {"ops", 6},
                            {"awaited", {"b", "c", "d", "e"}}}));
  for (int t = 1; t < 6; ++t) rig->ready(t);
  rig->end_backward();
  rig.complete(0);
  ASSERT_TRUE(rig.communicator.await_launches(2));
  EXPECT_EQ(status().at("phase"), "flight");
  EXPECT_EQ(status().at("completed"), 1);
  EXPECT_EQ(status().at("awaited"), json::array());
  for (int op = 1; op < 6; ++op) rig.complete(op);
  rig->drain();
  EXPECT_EQ(status().at("phase"), "idle");
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

TEST(EngineFault, AFailedOpEndsEveryCallWithWhatOnFaultSays) {
  std::string told;
  EngineOptions options;
  options.on_fault = [&](const std::string& raw) {
    told = raw;
    return "rank 2 is lost";
  };
  Rig rig(plan_of(3), options);
  rig.backward();
  rig.complete(0);
  rig->wait(0);
  ASSERT_TRUE(rig.communicator.await_launches(3));  // nothing is launched after the fault
  rig.fail_op(1, "connection reset");
  EXPECT_EQ(message_of<FaultError>([&] { rig->drain(); }), "rank 2 is lost");
  expect_every_call_throws(*rig.engine, "rank 2 is lost");
  for (const char* part : {"op 1", "all_reduce", "b)", "step 1", "connection reset"}) {
    EXPECT_NE(told.find(part), std::string::npos) << told;
  }
  rig.complete(2);  // too late to matter
  expect_every_call_throws(*rig.engine, "rank 2 is lost");
}

TEST(EngineFault, WithoutOnFaultTheOpAndItsParametersAreNamed) {
  Rig rig(plan_of(2));
  rig.backward();
  rig.fail_op(0, "connection reset");
  const std::string message = message_of<FaultError>([&] { rig->wait(1); });
  EXPECT_NE(message.find("op 0 (all_reduce"), std::string::npos) << message;
  EXPECT_NE(message.find("a)"), std::string::npos) << message;
  EXPECT_NE(message.find("connection reset"), std::string::npos) << message;
}

TEST(EngineFault, NothingIsLaunchedAfterAFault) {
  Rig rig(plan_of(3, 1));
  rig.backward();
  rig.fail_op(0, "lost");
  EXPECT_THROW(rig->drain(), FaultError);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(rig.communicator.launched(), 1);
}

TEST(EngineFault, AnEmptyAnswerOfOnFaultIsAFaultAllTheSame) {
  EngineOptions options;
  options.on_fault = [](const std::string&) { return ""; };
  Rig rig(plan_of(1), options);
  rig.backward();
  rig.fail_op(0, "connection reset");
  const double start = now_s();
  const auto give_up = [&] {
    if (now_s() - start > 2) throw std::runtime_error("still waiting");
  };
  EXPECT_THROW(rig->drain(give_up), FaultError);
}

TEST(EngineFault, AnExceptionFromOnFaultDoesNotEndTheProcess) {
  EngineOptions options;
  options.on_fault = [](const std::string&) -> std::string {
    throw std::runtime_error("the store is gone");
  };
  Rig rig(plan_of(1), options);
  rig.backward();
  rig.fail_op(0, "connection reset");
  const std::string message = message_of<FaultError>([&] { rig->drain(); });
  EXPECT_NE(message.find("connection reset"), std::string::npos) << message;
}

TEST(EngineFault, AStalledOpWarnsOnceThenFails) {
  std::vector<std::string> warnings;
  EngineOptions options;
  options.stall_warning_s = 0.05;
  options.stall_limit_s = 1;
  options.on_warning = [&](const std::string& line) { warnings.push_back(line); };
  Rig rig(plan_of(2), options);
  const double start = now_s();
  rig.backward();
  const std::string message = message_of<FaultError>([&] { rig->drain(); });
  EXPECT_GE(now_s() - start, 1);
  EXPECT_NE(message.find("op 0"), std::string::npos) << message;
  EXPECT_NE(message.find("stall"), std::string::npos) << message;
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("op 0"), std::string::npos) << warnings[0];
}

TEST(EngineFault, TheOpThatStalledIsNamedWhateverTheOrderOfTheOthers) {
  EngineOptions options;
  options.stall_limit_s = 0.5;
  Rig rig(plan_of(4), options);
  rig.backward();
  for (int op : {1, 0, 3}) rig.complete(op);
  const std::string message = message_of<FaultError>([&] { rig->drain(); });
  EXPECT_NE(message.find("op 2"), std::string::npos) << message;
}

// Many ops in flight share the network: as long as one after the other completes, nothing stalls.
TEST(EngineFault, SteadyProgressIsNoStall) {
  EngineOptions options;
  options.stall_limit_s = 1;
  Rig rig(plan_of(8), options);
  rig.backward();
  for (int op = 0; op < 8; ++op) {
    std::this_thread::sleep_for(milliseconds(200));
    rig.complete(op);
  }
  EXPECT_NO_THROW(rig->drain());
}

TEST(EngineFault, WaitingForGradientsIsNoStall) {
  EngineOptions options;
  options.stall_limit_s = 0.5;
  Rig rig(plan_of(1), options);
  rig->begin_step();
  std::this_thread::sleep_for(milliseconds(800));
  rig->ready(0);
  rig->end_backward();
  rig.complete(0);
  EXPECT_NO_THROW(rig->drain());
}

TEST(EngineFault, FailWakesEveryWaiterAndTheFirstMessageStays) {
  Rig rig(plan_of(2));
  rig.backward();
  std::atomic<int> woken = 0;
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&, i] {
      const std::string message =
          message_of<FaultError>([&] { i < 2 ? rig->wait(i) : rig->drain(); });
      EXPECT_EQ(message, "rank 3: out of memory");
      ++woken;
    });
  }
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(woken, 0);
  rig->fail("rank 3: out of memory");
  rig->fail("rank 1: something else");
  for (std::thread& w : waiters) w.join();
  expect_every_call_throws(*rig.engine, "rank 3: out of memory");
}

TEST(EngineFault, RanksWithDifferentPlansAllFail) {
  auto ranks = make_local_communicators(3);
  on_each_rank(3, [&](int rank) {
    std::vector<std::byte> arena(1024);
    const std::vector<TensorSpec> tensors = {{"w", 8, DType::float32, 0}};
    std::vector<Op> ops = {{Collective::all_reduce, {{0, 8}}, kUnlimited, false}};
    if (rank == 1) ops = {{Collective::all_reduce, {{0, 4}, {4, 8}}, kUnlimited, false}};
    Engine engine(Plan("test", tensors, ops), arena.data(), *ranks[static_cast<size_t>(rank)]);
    engine.begin_step();
    engine.ready(0);
    engine.end_backward();
    const std::string message = message_of<FaultError>([&] { engine.drain(); });
    EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
    EXPECT_NE(message.find("counts [4, 4] against [8]"), std::string::npos) << message;
    EXPECT_NE(message.find("w)"), std::string::npos) << message;
  });
}

TEST(EngineFault, ALostRankFailsTheOthers) {
  auto ranks = make_local_communicators(3);
  on_each_rank(3, [&](int rank) {
    if (rank == 2) return ranks[2].reset();
    const Plan plan = plan_of(4);
    std::vector<std::byte> arena(static_cast<size_t>(plan.arena_bytes()));
    Engine engine(plan, arena.data(), *ranks[static_cast<size_t>(rank)]);
    engine.begin_step();
    for (int t = 3; t >= 0; --t) engine.ready(t);
    const std::string message = message_of<FaultError>([&] { engine.wait(3); });
    EXPECT_NE(message.find("rank 2"), std::string::npos) << message;
  });
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
  rig.backward();
  std::thread network([&] {
    for (int op = 0; op < kTensors; ++op) {
      std::this_thread::sleep_for(milliseconds(30));
      rig.complete(op);
    }
  });
  int polls = 0;
  rig->wait(kTensors - 1, [&] { ++polls; });
  network.join();
  EXPECT_GE(polls, 2);
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

TEST(EngineEnd, MayComeAtAnyMoment) {
  for (int i = 0; i < 200; ++i) {
    auto ranks = make_local_communicators(2);
    on_each_rank(2, [&](int rank) {
      const Plan plan = plan_of(5, i % 2 ? 1 : kUnlimited);
      std::vector<std::byte> arena(static_cast<size_t>(plan.arena_bytes()));
      Engine engine(plan, arena.data(), *ranks[static_cast<size_t>(rank)]);
      engine.begin_step();
      // The ranks stop at the same tensor: what one has launched, the other launches too.
      for (int t = 0; t < i % 6; ++t) engine.ready(t);
      for (int t = 0; t < i % 6; ++t) engine.wait(t);
    });
  }
}

class EngineTimeline : public testing::Test {
 protected:
  EngineTimeline() : path_(testing::TempDir() + "usbyte_engine_" + std::to_string(getpid())) {}
  ~EngineTimeline() override { std::filesystem::remove(path_); }

  std::shared_ptr<TimelineWriter> writer(const char* steps) const {
    return std::make_shared<TimelineWriter>(path_, 0, StepRange::parse(steps));
  }
  // Number of events by kind and step, as "queue 2".
  std::map<std::string, int> counts() const {
    std::ifstream in(path_);
    std::map<std::string, int> out;
    for (const json& e : json::parse(in)) {
      if (e.at("ph") != "X") continue;
      ++out[e.at("cat").get<std::string>() + " " + e.at("args").at("step").dump()];
      EXPECT_GE(e.at("dur").get<double>(), 0);
    }
    return out;
  }
  static void step(Rig& rig, int number) {
    rig.backward();
    // Completed by the first poll, so that there is a wait to record.
    int op = 3 * (number - 1);
    rig->wait(2, [&] {
      while (op < 3 * number) rig.complete(op++);
    });
    rig->record_update({0, 1}, now_s(), now_s());
    rig->drain();
  }

  std::string path_;
};

TEST_F(EngineTimeline, RecordsTheStepsInRange) {
  Rig rig(plan_of(3));
  rig->set_timeline(writer("2:4"));
  for (int i = 1; i <= 5; ++i) step(rig, i);
  rig->set_timeline(nullptr);
  EXPECT_EQ(counts(), (std::map<std::string, int>{{"communication 2", 3},
                                                  {"communication 3", 3},
                                                  {"gate 2", 1},
                                                  {"gate 3", 1},
                                                  {"queue 2", 3},
                                                  {"queue 3", 3},
                                                  {"update 2", 1},
                                                  {"update 3", 1}}));
}

TEST_F(EngineTimeline, BeginsWithTheNextStepAndEndsWithTheLastCompleteOne) {
  Rig rig(plan_of(3));
  step(rig, 1);
  rig->set_timeline(writer(":"));
  step(rig, 2);
  rig->set_timeline(nullptr);
  step(rig, 3);
  const auto recorded = counts();
  EXPECT_FALSE(recorded.contains("communication 1"));
  EXPECT_EQ(recorded.at("communication 2"), 3);
  EXPECT_EQ(recorded.at("update 2"), 1);
  EXPECT_FALSE(recorded.contains("communication 3"));
}

TEST_F(EngineTimeline, HoldsTheLastStepWhenTheEngineEnds) {
  Rig rig(plan_of(3));
  rig->set_timeline(writer(":"));
  step(rig, 1);
  rig.engine.reset();
  EXPECT_EQ(counts().at("communication 1"), 3);
}

TEST_F(EngineTimeline, HoldsWhatHappenedBeforeAFault) {
  Rig rig(plan_of(3));
  rig->set_timeline(writer(":"));
  rig.backward();
  rig.complete(0);
  rig.fail_op(1, "connection reset");
  EXPECT_THROW(rig->drain(), FaultError);
  rig.engine.reset();
  EXPECT_EQ(counts().at("communication 1"), 1);
}

}  // namespace
}  // namespace usbyte
