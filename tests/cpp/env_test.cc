// SPDX-License-Identifier: Apache-2.0
#include "usbyte/env.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "usbyte/error.h"

namespace usbyte {
namespace {

/// Runs each test without USBYTE_* variables and puts back those that were there.
class EnvTest : public testing::Test {
 protected:
  void SetUp() override {
    saved_ = usbyte_variables();
    for (const auto& [name, value] : saved_) unsetenv(name.c_str());
  }
  void TearDown() override {
    for (const auto& [name, value] : usbyte_variables()) unsetenv(name.c_str());
    for (const auto& [name, value] : saved_) setenv(name.c_str(), value.c_str(), 1);
  }

  static Env read_with(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    return Env::read();
  }
  static std::string error_with(const std::string& name, const std::string& value) {
    try {
      read_with(name, value);
    } catch (const EnvError& error) {
      return error.what();
    }
    return "no error";
  }

 private:
  static std::map<std::string, std::string> usbyte_variables() {
    std::map<std::string, std::string> found;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text(*entry);
      const size_t equals = text.find('=');
      if (text.starts_with("USBYTE_")) found[text.substr(0, equals)] = text.substr(equals + 1);
    }
    return found;
  }

  std::map<std::string, std::string> saved_;
};

constexpr int64_t kMiB = int64_t{1} << 20;

TEST_F(EnvTest, Defaults) {
  const Env env = Env::read();
  EXPECT_EQ(env.backend, "");
  EXPECT_EQ(env.policy, "");
  EXPECT_EQ(env.partition_bytes, 32 * kMiB);
  EXPECT_EQ(env.credit_bytes, 64 * kMiB);
  EXPECT_EQ(env.bucket_bytes, 25 * kMiB);
  EXPECT_EQ(env.one_shot_bytes, 32 * 1024);
  EXPECT_EQ(env.learning_steps, 5);
  EXPECT_EQ(env.stall_warning_s, 60);
  EXPECT_EQ(env.stall_limit_s, 300);
  EXPECT_EQ(env.start_limit_s, 60);
  EXPECT_EQ(env.check_steps, 50);
  EXPECT_EQ(env.nccl_max_ctas, 0);
  EXPECT_EQ(env.nccl_register, 0);
  EXPECT_EQ(env.timeline, "");
  EXPECT_EQ(env.timeline_steps, "0:");
  EXPECT_EQ(env.report, "");
  EXPECT_EQ(env.flight, "");
  EXPECT_EQ(env.job_token, "");
  EXPECT_EQ(env.log_level, "warning");
  for (const EnvVariable& variable : env.variables) {
    EXPECT_FALSE(variable.set) << variable.name;
    EXPECT_FALSE(variable.description.empty()) << variable.name;
  }
}

TEST_F(EnvTest, VariablesSayWhatIsInForce) {
  const Env env = read_with("USBYTE_CREDIT_BYTES", "2M");
  const auto credit = std::find_if(env.variables.begin(), env.variables.end(),
                                   [](const auto& v) { return v.name == "USBYTE_CREDIT_BYTES"; });
  ASSERT_NE(credit, env.variables.end());
  EXPECT_EQ(credit->value, "2097152");
  EXPECT_EQ(credit->unit, "bytes");
  EXPECT_TRUE(credit->set);
}

TEST_F(EnvTest, BytesTakeSuffixes) {
  const std::vector<std::pair<std::string, int64_t>> cases = {
      {"1", 1},
      {"8388608", 8 * kMiB},
      {"8M", 8 * kMiB},
      {"8MiB", 8 * kMiB},
      {"512k", 524288},
      {"512K", 524288},
      {"512KiB", 524288},
      {"8m", 8 * kMiB},
      {"3G", 3072 * kMiB},
      {"3GiB", 3072 * kMiB},
      {"8589934591G", 8589934591 * 1024 * kMiB}};
  for (const auto& [text, bytes] : cases) {
    EXPECT_EQ(read_with("USBYTE_PARTITION_BYTES", text).partition_bytes, bytes) << text;
  }
}

TEST_F(EnvTest, BytesRejectWhatIsAmbiguousOrTooLarge) {
  for (const char* text : {"0", "-1", "8MB", "8B", "8iB", "M", "1.5M", "8 M", " 8M", "8T", "8Mi",
                           "0x10", "99999999999999999999", "8589934592G"}) {
    const std::string error = error_with("USBYTE_BUCKET_BYTES", text);
    EXPECT_NE(error.find(std::string("USBYTE_BUCKET_BYTES=\"") + text + "\""), std::string::npos)
        << text << ": " << error;
    EXPECT_NE(error.find("powers of 1024"), std::string::npos) << error;
  }
}

TEST_F(EnvTest, SecondsArePositiveAndCanBeCountedInNanoseconds) {
  EXPECT_EQ(read_with("USBYTE_STALL_LIMIT_S", "1.5").stall_limit_s, 1.5);
  EXPECT_EQ(read_with("USBYTE_STALL_LIMIT_S", "1e8").stall_limit_s, 1e8);
  EXPECT_EQ(read_with("USBYTE_START_LIMIT_S", "2").start_limit_s, 2);
  for (const char* name :
       {"USBYTE_STALL_LIMIT_S", "USBYTE_STALL_WARNING_S", "USBYTE_START_LIMIT_S"}) {
    for (const char* text :
         {"-1", "0", "nan", "inf", "1.1e8", "1e-400", "1e18", "1e999", "1s", "1,5", "ten"}) {
      const std::string error = error_with(name, text);
      EXPECT_NE(error.find("at most 1e8"), std::string::npos) << text << ": " << error;
    }
    unsetenv(name);
  }
}

TEST_F(EnvTest, LearningStepsAreAtLeastOne) {
  EXPECT_EQ(read_with("USBYTE_LEARNING_STEPS", "1").learning_steps, 1);
  for (const char* text : {"0", "-3", "3.5", "3k", "many"}) {
    EXPECT_NE(error_with("USBYTE_LEARNING_STEPS", text).find(">= 1"), std::string::npos) << text;
  }
}

TEST_F(EnvTest, CheckStepsMayBeNone) {
  EXPECT_EQ(read_with("USBYTE_CHECK_STEPS", "0").check_steps, 0);
  EXPECT_EQ(read_with("USBYTE_CHECK_STEPS", "7").check_steps, 7);
  for (const char* text : {"-1", "1.5", "2k", "never"}) {
    EXPECT_NE(error_with("USBYTE_CHECK_STEPS", text).find(">= 0"), std::string::npos) << text;
  }
}

TEST_F(EnvTest, NumbersThatAreAllocatedOrNarrowedHaveAnUpperBound) {
  EXPECT_EQ(read_with("USBYTE_CHUNK_BYTES", "1G").chunk_bytes, 1024 * kMiB);
  EXPECT_EQ(read_with("USBYTE_NCCL_MAX_CTAS", "1024").nccl_max_ctas, 1024);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"USBYTE_CHUNK_BYTES", "8589934591G"},
      {"USBYTE_CHUNK_BYTES", "1025M"},
      {"USBYTE_NCCL_MAX_CTAS", "4294967297"},
      {"USBYTE_NCCL_MAX_CTAS", "-1"},
      {"USBYTE_NCCL_COMMUNICATORS", "9223372036854775807"},
      {"USBYTE_ONE_SHOT_BYTES", "9223372036854775807"},
      {"USBYTE_LEARNING_STEPS", "9223372036854775808"},
      {"USBYTE_TIMELINE_STEPS", "0:9223372036854775808"}};
  for (const auto& [name, text] : cases) {
    const std::string error = error_with(name, text);
    EXPECT_NE(error.find(name + "=\"" + text + "\" cannot be used"), std::string::npos) << error;
    unsetenv(name.c_str());
  }
}

TEST_F(EnvTest, TimelineSteps) {
  for (const char* text : {"0:", ":", ":5", "100:110"}) {
    EXPECT_EQ(read_with("USBYTE_TIMELINE_STEPS", text).timeline_steps, text);
  }
  for (const char* text : {"5", "-1:", "5:5", "7:3", "a:b", "1:2:3"}) {
    EXPECT_NE(error_with("USBYTE_TIMELINE_STEPS", text).find("FIRST:LAST"), std::string::npos)
        << text;
  }
}

TEST_F(EnvTest, LogLevel) {
  EXPECT_EQ(read_with("USBYTE_LOG_LEVEL", "debug").log_level, "debug");
  EXPECT_NE(error_with("USBYTE_LOG_LEVEL", "loud").find("debug, info"), std::string::npos);
}

TEST_F(EnvTest, EmptyIsUnset) {
  const Env env = read_with("USBYTE_CREDIT_BYTES", "");
  EXPECT_EQ(env.credit_bytes, 64 * kMiB);
  EXPECT_TRUE(std::none_of(env.variables.begin(), env.variables.end(),
                           [](const EnvVariable& variable) { return variable.set; }));
}

TEST_F(EnvTest, UnknownNameSuggestsTheNearest) {
  const std::string typo = error_with("USBYTE_PARTITON_BYTES", "8M");
  EXPECT_NE(typo.find("USBYTE_PARTITON_BYTES"), std::string::npos) << typo;
  EXPECT_NE(typo.find("did you mean USBYTE_PARTITION_BYTES?"), std::string::npos) << typo;
  unsetenv("USBYTE_PARTITON_BYTES");
  const std::string beginning = error_with("USBYTE_STALL", "8");
  EXPECT_NE(beginning.find("did you mean USBYTE_STALL_WARNING_S?"), std::string::npos) << beginning;
}

TEST_F(EnvTest, NamesOfTheBuildAndTheLoaderAreKnown) {
  setenv("USBYTE_NCCL_LIB", "/opt/nccl/libnccl.so.2", 1);
  EXPECT_NO_THROW(read_with("USBYTE_CUDA", "OFF"));
}

}  // namespace
TEST_F(EnvTest, TheTokenOfTheJobIsNotShown) {
  const Env env = read_with("USBYTE_JOB_TOKEN", "0123abc");
  EXPECT_EQ(env.job_token, "0123abc");
  for (const EnvVariable& variable : env.variables) {
    EXPECT_EQ(variable.value.find("0123abc"), std::string::npos) << variable.name;
  }
}

}  // namespace usbyte
