// SPDX-License-Identifier: Apache-2.0
#include "usbyte/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "comm/local_communicator.h"
#include "engine_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using std::chrono::milliseconds;
using test::expect_every_call_throws;
using test::kUnlimited;
using test::message_of;
using test::on_each_rank;
using test::plan_of;
using test::Rig;

/// What a call says has ended it; "" if nothing has.
std::string fault_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const FaultError& fault) {
    return fault.what();
  }
  return "";
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
    if (now_s() - start > 20) throw std::runtime_error("still waiting");
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
  options.stall_limit_s = 4;  // a thread that sleeps past it does not warn
  options.on_warning = [&](const std::string& line) { warnings.push_back(line); };
  options.on_stall = [](const std::string& line) { return line + ": rank 1 sleeps"; };
  Rig rig(plan_of(2), options);
  const double start = now_s();
  rig.backward();
  const std::string message = message_of<FaultError>([&] { rig->drain(); });
  EXPECT_GE(now_s() - start, 4);
  EXPECT_NE(message.find("op 0"), std::string::npos) << message;
  EXPECT_NE(message.find("stall"), std::string::npos) << message;
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("op 0"), std::string::npos) << warnings[0];
  EXPECT_TRUE(warnings[0].ends_with(": rank 1 sleeps")) << warnings[0];
}

// The second one is launched by the thread that reports the first one's end. Who slept until the
// first one's limit would not be back here.
TEST(EngineFault, AfterAStallThatPassedTheNextOneWarnsInTime) {
  std::atomic<int> warnings = 0;
  EngineOptions options;
  options.stall_warning_s = 0.05;
  options.stall_limit_s = 3600;
  options.on_warning = [&](const std::string&) { ++warnings; };
  Rig rig(plan_of(2, 1), options);
  const auto await_warning = [&](int count) {
    for (int i = 0; i < 60'000 && warnings < count; ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(warnings, count);
  };
  rig.backward();
  await_warning(1);
  std::this_thread::sleep_for(milliseconds(5));  // it goes to sleep again
  rig.complete(0);
  await_warning(2);
  rig.complete(1);
  EXPECT_NO_THROW(rig->drain());
}

/// Does it anew as often as the machine takes `limit_s` for what takes a moment: an engine may call
/// that a stall.
void undisturbed(double limit_s, const std::function<double()>& longest_s) {
  for (int tries = 0; tries < 20; ++tries) {
    if (longest_s() < limit_s) return;
  }
  FAIL() << "this machine stands still all the time";
}

TEST(EngineFault, TheOpThatStalledIsNamedWhateverTheOrderOfTheOthers) {
  EngineOptions options;
  options.stall_limit_s = 0.5;
  undisturbed(options.stall_limit_s, [&] {
    Rig rig(plan_of(4), options);
    const double start = now_s();
    rig.backward();
    for (int op : {1, 0, 3}) rig.complete(op);
    const double took_s = now_s() - start;
    const std::string message = message_of<FaultError>([&] { rig->drain(); });
    if (took_s < options.stall_limit_s) {
      EXPECT_NE(message.find("op 2"), std::string::npos) << message;
    }
    return took_s;
  });
}

// Many ops in flight share the network: as long as one after the other completes, nothing stalls.
TEST(EngineFault, SteadyProgressIsNoStall) {
  EngineOptions options;
  options.stall_limit_s = 1;
  undisturbed(options.stall_limit_s, [&] {
    Rig rig(plan_of(8), options);
    double last = now_s(), longest_s = 0;
    rig.backward();
    for (int op = 0; op < 8; ++op) {
      std::this_thread::sleep_for(milliseconds(200));
      const double before = now_s();
      rig.complete(op);
      longest_s = std::max(longest_s, now_s() - std::exchange(last, before));
    }
    const std::string message = fault_of([&] { rig->drain(); });
    if (longest_s < options.stall_limit_s) {
      EXPECT_EQ(message, "");
    }
    return longest_s;
  });
}

TEST(EngineFault, WaitingForGradientsIsNoStall) {
  EngineOptions options;
  options.stall_limit_s = 0.5;
  undisturbed(options.stall_limit_s, [&] {
    Rig rig(plan_of(1), options);
    rig->begin_step();
    std::this_thread::sleep_for(milliseconds(800));
    const double start = now_s();
    const std::string message = fault_of([&] {
      rig->ready(0);
      rig->end_backward();
      rig.complete(0);
      rig->drain();
    });
    const double took_s = now_s() - start;
    if (took_s < options.stall_limit_s) {
      EXPECT_EQ(message, "");
    }
    return took_s;
  });
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

TEST(EngineFault, AFailerNeitherKeepsTheEngineNorNeedsIt) {
  Rig rig(plan_of(1));
  const auto fail = rig->fail_callback();
  fail("rank 3: out of memory");
  expect_every_call_throws(*rig.engine, "rank 3: out of memory");
  rig.engine.reset();
  fail("too late to matter");
}

TEST(EngineFault, TheEnginesOwnThreadMayFailItWhileItEnds) {
  std::atomic<bool> told = false, ending = false;
  std::function<void(const std::string&)> fail;
  EngineOptions options;
  options.on_fault = [&](const std::string&) {
    told = true;
    while (!ending) std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(20));  // the end waits for this thread
    fail("rank 2 is lost");
    return "rank 2 is lost";
  };
  Rig rig(plan_of(1), options);
  fail = rig->fail_callback();
  rig.backward();
  rig.fail_op(0, "connection reset");
  while (!told) std::this_thread::sleep_for(milliseconds(1));
  ending = true;
  rig.engine.reset();
}

TEST(EngineFault, RanksWithDifferentPlansAllFail) {
  auto ranks = make_local_communicators(3);
  on_each_rank(3, [&](int rank) {
    std::vector<std::byte> flat_buffer(1024);
    const std::vector<TensorSpec> tensors = {{"w", 8, DType::float32, 0}};
    std::vector<Op> ops = {{Collective::all_reduce, {{0, 8}}, kUnlimited, false}};
    if (rank == 1) ops = {{Collective::all_reduce, {{0, 4}, {4, 8}}, kUnlimited, false}};
    Engine engine(Plan("test", tensors, ops), flat_buffer.data(),
                  *ranks[static_cast<size_t>(rank)]);
    const std::string message = message_of<FaultError>([&] {
      engine.begin_step();
      engine.ready(0);
      engine.end_backward();
      engine.drain();
    });
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
    std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
    Engine engine(plan, flat_buffer.data(), *ranks[static_cast<size_t>(rank)]);
    const std::string message = message_of<FaultError>([&] {
      engine.begin_step();
      for (int t = 3; t >= 0; --t) engine.ready(t);
      engine.wait(3);
    });
    EXPECT_NE(message.find("rank 2"), std::string::npos) << message;
  });
}

}  // namespace
}  // namespace usbyte
