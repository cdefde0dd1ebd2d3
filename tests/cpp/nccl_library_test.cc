// SPDX-License-Identifier: Apache-2.0
#include "cuda/nccl/nccl_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "ranks.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::message_of;

/// Of the library fake_libnccl.c in one of its makes, each in a folder of its own.
std::string fake(const std::string& make) {
  return std::string(USBYTE_FAKE_NCCL_DIR) + "/" + make + "/libnccl.so.2";
}

void expect_in(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  }
}

bool same(const std::string& a, const std::string& b) { return std::filesystem::equivalent(a, b); }

/// Keeps a library in the process, as torch does.
class Loaded {
 public:
  explicit Loaded(const std::string& file) : handle_(dlopen(file.c_str(), RTLD_LAZY)) {
    EXPECT_NE(handle_, nullptr) << dlerror();
  }
  ~Loaded() { dlclose(handle_); }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

 private:
  void* handle_;
};

// Each test is a process of its own under ctest; together they run in this order, and what is
// opened stays. Those that need a process without NCCL come first.

TEST(NcclLibrary, NoneFoundSaysWhatToInstall) {
  if (!mapped_nccl_copies().empty() || dlopen("libnccl.so.2", RTLD_LAZY)) {
    GTEST_SKIP() << "this machine has NCCL";
  }
  expect_in(message_of<UsageError>([] { open_nccl("", {"/nowhere/libnccl.so.2"}); }),
            {"pip install nvidia-nccl", "USBYTE_NCCL_LIB", "/nowhere/libnccl.so.2"});
}

TEST(NcclLibrary, AChosenOneIsUsedOrNone) {
  expect_in(message_of<UsageError>([] { open_nccl("/nowhere/libnccl.so", {fake("new")}); }),
            {"/nowhere/libnccl.so", "USBYTE_NCCL_LIB"});
  EXPECT_TRUE(same(open_nccl(fake("other"), {fake("new")})->path(), fake("other")));
}

TEST(NcclLibrary, TooOldSaysHowOld) {
  expect_in(message_of<UsageError>([] { open_nccl(fake("old"), {}); }),
            {fake("old"), "NCCL 2.13.4", "2.14.0 or newer"});
}

TEST(NcclLibrary, AMissingFunctionIsNamed) {
  expect_in(message_of<UsageError>([] { open_nccl(fake("incomplete"), {}); }),
            {"ncclCommWindowDeregister", fake("incomplete")});
}

TEST(NcclLibrary, WhatIsLoadedComesBeforeCandidates) {
  const Loaded torchs(fake("new"));
  const std::vector<std::string> before = mapped_nccl_copies();
  const std::string path = open_nccl("", {fake("early")})->path();
  EXPECT_EQ(std::count(before.begin(), before.end(), path), 1) << path;
  EXPECT_EQ(mapped_nccl_copies(), before);
}

TEST(NcclLibrary, CandidatesAreTriedInOrder) {
  if (!mapped_nccl_copies().empty()) GTEST_SKIP() << "another test has loaded one";
  const auto nccl = open_nccl("", {"/nowhere/libnccl.so.2", fake("early"), fake("new")});
  EXPECT_TRUE(same(nccl->path(), fake("early")));
}

TEST(NcclLibrary, KeepsOneAndWarnsOfASecond) {
  const auto first = load_nccl(fake("new"), {});
  EXPECT_EQ(first->version(), 22809);
  EXPECT_EQ(load_nccl("", {fake("other")}), first);
  EXPECT_EQ(load_nccl(fake("new"), {}), first);
  expect_in(message_of<UsageError>([] { load_nccl(fake("other"), {}); }),
            {fake("new"), fake("other"), "before the first use"});
  const Loaded second(fake("other"));
  EXPECT_GE(mapped_nccl_copies().size(), 2U);
}

TEST(NcclLibrary, PassesArgumentsOn) {
  const auto nccl = open_nccl(fake("new"), {});
  EXPECT_EQ(nccl->error_string(NcclResult::in_progress), "in progress");
  EXPECT_EQ(nccl->last_error(nullptr), "");
  NcclId id;
  EXPECT_EQ(nccl->unique_id(&id), NcclResult::success);
  EXPECT_EQ(id.bytes[5], 5);
  const auto made_with = [&](NcclApi& api, const NcclConfig& config) {
    NcclComm* comm = nullptr;
    EXPECT_EQ(api.comm_init(&comm, 3, id, 2, config), NcclResult::in_progress);
    NcclResult told{};
    EXPECT_EQ(api.comm_async_error(comm, &told), NcclResult::success);
    EXPECT_EQ(api.last_error(comm), "a communicator's");
    return static_cast<int>(told);
  };
  // Size of the config, its version, and limits.
  EXPECT_EQ(made_with(*nccl, {}), 32 + 21700);
  EXPECT_EQ(made_with(*nccl, {1, 8}), 32 + 21700 + 10000000 * (1 + 2 * 8));
  EXPECT_EQ(made_with(*open_nccl(fake("early"), {}), {}), 24 + 21400);
}

TEST(NcclLibrary, VersionsReadAsPeopleWriteThem) {
  EXPECT_EQ(nccl_version_text(22809), "2.28.9");
  EXPECT_EQ(nccl_version_text(21400), "2.14.0");
  EXPECT_EQ(nccl_version_text(2708), "2.7.8");
}

}  // namespace
}  // namespace usbyte
