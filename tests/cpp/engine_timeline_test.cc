// SPDX-License-Identifier: Apache-2.0
#include "usbyte/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "engine_rig.h"

namespace usbyte {
namespace {

using nlohmann::json;
using test::plan_of;
using test::Rig;

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
                                                  {"wait 2", 1},
                                                  {"wait 3", 1},
                                                  {"queue 2", 3},
                                                  {"queue 3", 3},
                                                  {"update 2", 1},
                                                  {"update 3", 1}}));
}

TEST_F(EngineTimeline, RecordsAWaitForAllGradients) {
  Rig rig(plan_of(3));
  rig->set_timeline(writer(":"));
  int op = 0;
  const auto complete_step = [&](int number) {
    while (op < 3 * number) rig.complete(op++);
  };
  rig.backward();
  rig->drain([&] { complete_step(1); });
  rig.backward();
  complete_step(2);
  rig->drain();  // has nothing to wait for
  rig->set_timeline(nullptr);
  const auto recorded = counts();
  EXPECT_EQ(recorded.at("wait 1"), 1);
  EXPECT_FALSE(recorded.contains("wait 2"));
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
