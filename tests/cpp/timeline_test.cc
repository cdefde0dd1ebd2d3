// SPDX-License-Identifier: Apache-2.0
#include "usbyte/timeline.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "ranks.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using nlohmann::json;
using test::message_of;
using Kind = Event::Kind;

class TimelineFile : public testing::Test {
 protected:
  TimelineFile() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    path_ =
        testing::TempDir() + "usbyte_" + info->name() + "_" + std::to_string(getpid()) + ".json";
  }
  ~TimelineFile() override { std::filesystem::remove(path_); }

  std::string text() const {
    std::ifstream in(path_, std::ios::binary);
    std::stringstream out;
    out << in.rdbuf();
    return out.str();
  }
  // Throws if the file is not valid JSON.
  json parse() const { return json::parse(text()); }
  std::vector<json> events(const std::string& phase) const {
    std::vector<json> out;
    for (const json& e : parse()) {
      if (e.at("ph") == phase) out.push_back(e);
    }
    return out;
  }

  std::string path_;
};

Event event(Kind kind, int64_t step, double start_s, double end_s, std::string label = "op") {
  return {kind, step, start_s, end_s, std::move(label), 1024};
}

TEST(Now, IsSecondsOfTheSteadyClock) {
  const double before = now_s();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double elapsed = now_s() - before;
  EXPECT_GE(elapsed, 0.02);
  EXPECT_LT(elapsed, 20);
}

TEST(StepRangeParse, ReadsBothSidesAndDefaults) {
  EXPECT_EQ(StepRange::parse("10:20").begin, 10);
  EXPECT_EQ(StepRange::parse("10:20").end, 20);
  EXPECT_EQ(StepRange::parse(":3").begin, 0);
  EXPECT_EQ(StepRange::parse(":3").end, 3);
  EXPECT_EQ(StepRange::parse("5:").end, StepRange().end);
  EXPECT_TRUE(StepRange::parse(":").contains(1'000'000));
  EXPECT_FALSE(StepRange::parse("10:20").contains(9));
  EXPECT_TRUE(StepRange::parse("10:20").contains(10));
  EXPECT_TRUE(StepRange::parse("10:20").contains(19));
  EXPECT_FALSE(StepRange::parse("10:20").contains(20));
}

TEST(StepRangeParse, NamesWhatItCannotRead) {
  for (const char* text : {"", "10", "a:b", "1:2:3", "-1:5", "+1:5", "3:3", "4:3", "0x1:9", " 1:2",
                           "1.5:3", ":0", "99999999999999999999:", "1:99999999999999999999"}) {
    const std::string message = message_of<UsageError>([&] { StepRange::parse(text); });
    EXPECT_NE(message.find(std::string("'").append(text).append("'")), std::string::npos)
        << message;
  }
}

TEST_F(TimelineFile, IsValidFromTheStartAndAfterEachWrite) {
  TimelineWriter writer(path_, 3, {});
  EXPECT_TRUE(events("X").empty());
  EXPECT_EQ(events("M").at(0).at("args").at("name"), "rank 3");
  test::Random random(1);
  size_t written = 0;
  for (int64_t step = 1; step <= 50; ++step) {
    Timeline timeline;
    for (int64_t i = random(0, 20); i > 0; --i) {
      const double start = static_cast<double>(step) + static_cast<double>(random(0, 99)) / 100;
      const double duration = static_cast<double>(random(0, 50)) / 100;
      timeline.push_back(event(static_cast<Kind>(random(1, 5)), step, start, start + duration));
    }
    writer.write(timeline);
    written += timeline.size();
    EXPECT_EQ(events("X").size(), written);
  }
}

TEST_F(TimelineFile, CarriesKindTimesStepBytesAndNumbers) {
  const double start = now_s();
  TimelineWriter writer(path_, 2, {});
  Event told = event(Kind::communication, 7, start, start + 0.0123456, "op 0 (all_reduce)");
  told.numbers = {{"gamma", 1.5}, {"rows", 3}};
  writer.write({told});
  const double wall =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const json e = events("X").at(0);
  EXPECT_EQ(e.at("name"), "op 0 (all_reduce)");
  EXPECT_EQ(e.at("cat"), "communication");
  EXPECT_EQ(e.at("pid"), 2);
  EXPECT_EQ(e.at("args").at("step"), 7);
  EXPECT_EQ(e.at("args").at("bytes"), 1024);
  EXPECT_EQ(e.at("args").at("gamma"), 1.5);
  EXPECT_EQ(e.at("args").at("rows"), 3);
  EXPECT_NEAR(e.at("dur").get<double>(), 12345.6, 0.01);   // microseconds
  EXPECT_NEAR(e.at("ts").get<double>() * 1e-6, wall, 30);  // on the wall clock
  EXPECT_EQ(text().find("e+"), std::string::npos) << "time stamps must not have exponents";
}

TEST_F(TimelineFile, ShowsAStepAsAnInstant) {
  const double start = now_s();
  TimelineWriter writer(path_, 2, {});
  writer.write({event(Kind::step, 7, start, start, "step 7"),
                event(Kind::compute, 7, start, start + 0.01, "forward")});
  EXPECT_EQ(events("X").size(), 1U);
  const json e = events("i").at(0);
  EXPECT_EQ(e.at("name"), "step 7");
  EXPECT_EQ(e.at("cat"), "step");
  EXPECT_EQ(e.at("s"), "t");
  EXPECT_EQ(e.at("args").at("step"), 7);
  EXPECT_EQ(e.at("ts"), events("X").at(0).at("ts"));
  EXPECT_FALSE(e.contains("dur"));
}

TEST_F(TimelineFile, GivesEachKindANamedThread) {
  TimelineWriter writer(path_, 0, {});
  for (int64_t step = 0; step < 3; ++step) {
    const auto at = static_cast<double>(step);
    writer.write({event(Kind::queue, step, at, at + 0.1), event(Kind::wait, step, at, at + 0.1),
                  event(Kind::communication, step, at + 0.1, at + 0.2),
                  event(Kind::communication, step, at + 0.2, at + 0.3),
                  event(Kind::update, step, at + 0.5, at + 0.6),
                  event(Kind::compute, step, at, at + 0.4), event(Kind::step, step, at, at)});
  }
  std::map<std::string, std::set<int64_t>> threads;
  for (const json& e : events("X")) threads[e.at("cat")].insert(e.at("tid").get<int64_t>());
  for (const json& e : events("i")) threads[e.at("cat")].insert(e.at("tid").get<int64_t>());
  ASSERT_EQ(threads.size(), Event::kKinds);
  std::map<int64_t, std::string> names;
  for (const json& e : events("M")) {
    if (e.at("name") == "thread_name") names[e.at("tid")] = e.at("args").at("name");
  }
  EXPECT_EQ(names.size(), Event::kKinds);
  for (const auto& [kind, tids] : threads) {
    ASSERT_EQ(tids.size(), 1U) << kind;
    EXPECT_EQ(names[*tids.begin()], kind);
  }
}

// Viewers drop an event that overlaps another on its thread.
TEST_F(TimelineFile, EventsOfOneThreadNeverOverlap) {
  TimelineWriter writer(path_, 0, {});
  test::Random random(2);
  size_t written = 0;
  for (int64_t step = 0; step < 20; ++step) {
    Timeline timeline;
    for (int i = 0; i < 15; ++i) {
      const double start = static_cast<double>(step * 10 + random(0, 12));
      timeline.push_back(
          event(Kind::communication, step, start, start + static_cast<double>(random(0, 8))));
    }
    writer.write(timeline);
    written += timeline.size();
  }
  std::map<int64_t, std::vector<std::pair<double, double>>> threads;
  for (const json& e : events("X")) {
    const double ts = e.at("ts").get<double>();
    threads[e.at("tid")].emplace_back(ts, ts + e.at("dur").get<double>());
  }
  EXPECT_GT(threads.size(), 1U);
  for (auto& [tid, spans] : threads) {
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i) {
      EXPECT_LE(spans[i - 1].second, spans[i].first + 1) << "thread " << tid;
    }
    written -= spans.size();
  }
  EXPECT_EQ(written, 0U);
}

TEST_F(TimelineFile, EscapesOddNames) {
  const std::vector<std::string> names = {"quote \" backslash \\ slash /",
                                          std::string("nul \0 tab \t newline \n", 21),
                                          "μ-Schicht.重み",
                                          "]\n[{}",
                                          "",
                                          "\x1b[31m"};
  TimelineWriter writer(path_, 0, {});
  for (const std::string& name : names) writer.write({event(Kind::wait, 1, 1, 2, name)});
  const std::vector<json> written = events("X");
  ASSERT_EQ(written.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(written[i].at("name"), names[i]);
  writer.write({event(Kind::wait, 1, 2, 3, "not UTF-8: \xff\xc3")});
  EXPECT_EQ(events("X").size(), names.size() + 1);
}

TEST_F(TimelineFile, RecordsOnlyTheStepsInRange) {
  TimelineWriter writer(path_, 0, StepRange::parse("3:5"));
  EXPECT_EQ(writer.steps().begin, 3);
  Timeline all;
  for (int64_t step = 0; step < 10; ++step) all.push_back(event(Kind::wait, step, 1, 2));
  writer.write(all);
  writer.write({});
  std::vector<int64_t> steps;
  for (const json& e : events("X")) steps.push_back(e.at("args").at("step"));
  EXPECT_EQ(steps, (std::vector<int64_t>{3, 4}));
}

TEST_F(TimelineFile, DescribesTheRunInMetadata) {
  TimelineWriter writer(path_, 3, {});
  writer.describe("usbyte_decision", R"({"plan":"{\"ops\":[]}","predicted_s":0.5})");
  writer.write({event(Kind::queue, 0, 1.0, 2.0)});
  const json trace = parse();
  const auto found = std::find_if(trace.begin(), trace.end(),
                                  [](const auto& e) { return e["name"] == "usbyte_decision"; });
  ASSERT_NE(found, trace.end());
  EXPECT_EQ((*found)["ph"], "M");
  EXPECT_EQ((*found)["pid"], 3);
  EXPECT_EQ((*found)["args"]["predicted_s"], 0.5);
  EXPECT_EQ((*found)["args"]["plan"], "{\"ops\":[]}");
  for (const char* wrong : {"", "[]", "{", "3"}) {
    EXPECT_THROW(writer.describe("x", wrong), UsageError) << wrong;
  }
  EXPECT_EQ(parse().size(), trace.size());
}

TEST_F(TimelineFile, TruncatesWhatWasThere) {
  std::ofstream(path_) << std::string(10'000, 'x');
  TimelineWriter writer(path_, 0, {});
  EXPECT_EQ(parse().size(), 1U);
}

TEST_F(TimelineFile, SurvivesAKilledProcess) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    TimelineWriter writer(path_, 0, {});
    writer.write({event(Kind::wait, 1, 1, 2)});
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(events("X").size(), 1U);
}

TEST_F(TimelineFile, AFullDiskIsAUsageErrorAndLeavesAValidFile) {
  TimelineWriter writer(path_, 0, {});
  writer.write({event(Kind::wait, 1, 1, 2)});
  // A file size limit stands in for a full disk: the kernel writes a part, then refuses.
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = old;
  small.rlim_cur = std::filesystem::file_size(path_) + 100;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message =
      message_of<UsageError>([&] { writer.write(Timeline(100, event(Kind::wait, 2, 3, 4))); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find(path_), std::string::npos) << message;
  EXPECT_EQ(events("X").size(), 1U);
  writer.write({event(Kind::wait, 3, 5, 6)});
  EXPECT_EQ(events("X").size(), 2U);
}

TEST(TimelineWriterErrors, NameThePathThatCannotBeCreated) {
  for (const std::string path : {"/nonexistent_directory/trace.json", "/"}) {
    const std::string message = message_of<UsageError>([&] { TimelineWriter writer(path, 0, {}); });
    EXPECT_NE(message.find(std::string("'").append(path).append("'")), std::string::npos)
        << message;
  }
}

}  // namespace
}  // namespace usbyte
