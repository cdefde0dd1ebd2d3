// SPDX-License-Identifier: Apache-2.0
#include "usbyte/engine.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
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
  std::map<std::string, int> counts() const { return counts(path_); }
  static std::map<std::string, int> counts(const std::string& path) {
    std::ifstream in(path);
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
  rig->set_timelines({writer("2:4")});
  for (int i = 1; i <= 5; ++i) step(rig, i);
  rig->set_timelines({});
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
  rig->set_timelines({writer(":")});
  int op = 0;
  const auto complete_step = [&](int number) {
    while (op < 3 * number) rig.complete(op++);
  };
  rig.backward();
  rig->drain([&] { complete_step(1); });
  rig.backward();
  complete_step(2);
  rig->drain();  // has nothing to wait for
  rig->set_timelines({});
  const auto recorded = counts();
  EXPECT_EQ(recorded.at("wait 1"), 1);
  EXPECT_FALSE(recorded.contains("wait 2"));
}

TEST_F(EngineTimeline, BeginsWithTheNextStepAndEndsWithTheLastCompleteOne) {
  Rig rig(plan_of(3));
  step(rig, 1);
  rig->set_timelines({writer(":")});
  step(rig, 2);
  rig->set_timelines({});
  step(rig, 3);
  const auto recorded = counts();
  EXPECT_FALSE(recorded.contains("communication 1"));
  EXPECT_EQ(recorded.at("communication 2"), 3);
  EXPECT_EQ(recorded.at("update 2"), 1);
  EXPECT_FALSE(recorded.contains("communication 3"));
}

TEST_F(EngineTimeline, MarksAStepWhereItsFirstPassBegins) {
  Rig rig(plan_of(3));
  rig->set_timelines({writer("2:4")});
  for (int i = 1; i <= 3; ++i) {
    const double begin_s = now_s();  // before the engine's step
    step(rig, i);
    rig->record_pass("backward", begin_s + 1e-3, begin_s + 2e-3);
    rig->record_pass("forward", begin_s, begin_s + 1e-3);
  }
  rig->set_timelines({});
  EXPECT_EQ(counts().at("compute 2"), 2);
  EXPECT_EQ(counts().at("compute 3"), 2);
  std::map<std::string, double> begins;  // by name
  std::vector<std::string> marks;
  std::ifstream in(path_);
  for (const json& e : json::parse(in)) {
    if (e.at("ph") == "i") marks.push_back(e.at("name"));
    if (e.at("ph") != "M" && e.at("args").at("step") == 2) begins[e.at("name")] = e.at("ts");
  }
  EXPECT_EQ(marks, (std::vector<std::string>{"step 2", "step 3"}));
  EXPECT_EQ(begins.at("step 2"), begins.at("forward"));
  EXPECT_NEAR(begins.at("backward") - begins.at("forward"), 1e3, 0.01);  // microseconds
}

TEST_F(EngineTimeline, RecordsSeveralTimelinesThatBeginAndEndByThemselves) {
  const std::string other = path_ + "_other";
  {
    Rig rig(plan_of(3));
    const auto whole = writer(":");
    rig->set_timelines({whole});
    step(rig, 1);
    rig->set_timelines({whole, std::make_shared<TimelineWriter>(other, 0, StepRange{})});
    step(rig, 2);
    rig->set_timelines({whole});
    step(rig, 3);
  }
  EXPECT_EQ(counts(), (std::map<std::string, int>{{"communication 1", 3},
                                                  {"communication 2", 3},
                                                  {"communication 3", 3},
                                                  {"wait 1", 1},
                                                  {"wait 2", 1},
                                                  {"wait 3", 1},
                                                  {"queue 1", 3},
                                                  {"queue 2", 3},
                                                  {"queue 3", 3},
                                                  {"update 1", 1},
                                                  {"update 2", 1},
                                                  {"update 3", 1}}));
  EXPECT_EQ(counts(other),
            (std::map<std::string, int>{
                {"communication 2", 3}, {"wait 2", 1}, {"queue 2", 3}, {"update 2", 1}}));
  std::filesystem::remove(other);
}

TEST_F(EngineTimeline, GoesOnWhenAnotherTimelineFails) {
  const std::string other = path_ + "_other";
  const auto full = std::make_shared<TimelineWriter>(other, 0, StepRange{});
  full->write(Timeline(100, {Event::Kind::wait, 1, 1, 2, "a"}));
  std::vector<std::string> warnings;
  EngineOptions options;
  options.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  // A file size limit stands in for a full disk. The other file is far below it.
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = old;
  small.rlim_cur = std::filesystem::file_size(other) + 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  {
    Rig rig(plan_of(3), options);
    rig->set_timelines({full, writer(":")});
    step(rig, 1);
    step(rig, 2);
  }
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(counts().at("communication 2"), 3);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find(other), std::string::npos) << warnings[0];
  std::filesystem::remove(other);
}

TEST_F(EngineTimeline, HoldsTheLastStepWhenTheEngineEnds) {
  Rig rig(plan_of(3));
  rig->set_timelines({writer(":")});
  step(rig, 1);
  rig.engine.reset();
  EXPECT_EQ(counts().at("communication 1"), 3);
}

TEST_F(EngineTimeline, HoldsWhatHappenedBeforeAFault) {
  Rig rig(plan_of(3));
  rig->set_timelines({writer(":")});
  rig.backward();
  rig.complete(0);
  rig.fail_op(1, "connection reset");
  EXPECT_THROW(rig->drain(), FaultError);
  rig.engine.reset();
  EXPECT_EQ(counts().at("communication 1"), 1);
}

}  // namespace
}  // namespace usbyte
