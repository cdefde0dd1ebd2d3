// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <latch>
#include <mutex>
#include <thread>

#include "mesh_rig.h"
#include "usbyte/error.h"

// When phases complete, and how a mesh communicator ends.
namespace usbyte {
namespace {

using namespace test;
using namespace std::chrono_literals;

const std::string kDestroyed =
    "the mesh communicator was destroyed before this request was complete";
const std::string kAborted = "the mesh communicator was aborted";

/// A rank of two whose launches complete when the test says so, or at once; no data moves. What is
/// in flight fails when it goes.
class ManualGroup final : public Communicator {
 public:
  explicit ManualGroup(int size = 2) : size_(size) {}
  ~ManualGroup() override {
    for (const Completion& done : pending_) {
      done(std::make_exception_ptr(FaultError("the group is gone")));
    }
  }

  int rank() const override { return 0; }
  int size() const override { return size_; }
  void launch(const Request& request, Completion done) override {
    std::unique_lock lock(mutex_);
    requests.push_back(request);
    const char here = 0;
    deepest = std::max(deepest, top ? std::abs(top - &here) : 0);
    changed_.notify_all();
    changed_.wait(lock, [this] { return !holds || (aborted && !holds_on); });
    if (keeps) kept.push_back(done);
    if (at_once || requests.size() == fails_at) {
      lock.unlock();
      return done(at_once ? nullptr : std::make_exception_ptr(FaultError("no route")));
    }
    pending_.push_back(std::move(done));
    changed_.notify_all();
  }
  void abort() override {
    std::lock_guard lock(mutex_);
    aborted = true;
    changed_.notify_all();
  }

  void let_on() {
    std::lock_guard lock(mutex_);
    holds_on = false;
    changed_.notify_all();
  }

  /// Those that are `in_flight` are counted from the oldest.
  void complete(size_t index = 0, std::exception_ptr error = nullptr) {
    std::unique_lock lock(mutex_);
    ASSERT_LT(index, pending_.size());
    const Completion done = std::move(pending_[index]);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(index));
    lock.unlock();
    done(std::move(error));
  }
  size_t in_flight() const {
    std::lock_guard lock(mutex_);
    return pending_.size();
  }
  template <typename Condition>
  void await(Condition condition) const {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, 20s, condition));
  }

  // Of one thread at a time, or behind await.
  std::vector<Request> requests;
  bool at_once = false, aborted = false;
  bool holds = false;     // launches, until it is aborted
  bool holds_on = false;  // then too
  bool keeps = false;     // completions
  size_t fails_at = 0;    // launches, the last of which fails at once
  std::vector<Completion> kept;
  const char* top = nullptr;  // of the stack
  std::ptrdiff_t deepest = 0;

 private:
  const int size_;
  mutable std::mutex mutex_;  // guards what follows and what is public
  mutable std::condition_variable changed_;
  std::vector<Completion> pending_;
};

/// Calls of completions, by name and in order.
class Log {
 public:
  Completion operator()(const std::string& name, std::function<void()> then = {}) {
    return [this, name, then = std::move(then)](const std::exception_ptr& error) {
      {
        std::lock_guard lock(mutex_);
        text_ += name + ": " + (error ? what(error) : "done") + "\n";
      }
      if (then) then();
    };
  }
  std::string take() {
    std::lock_guard lock(mutex_);
    return std::exchange(text_, "");
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

/// Rank 0 of a mesh of 2 x 2 whose network the test moves. Completions are in `log`.
class ManualMesh : public testing::Test {
 protected:
  const Topology topology = mesh({2, 2});
  std::shared_ptr<ManualGroup> flat = std::make_shared<ManualGroup>(4);
  std::shared_ptr<ManualGroup> d0 = std::make_shared<ManualGroup>();
  std::shared_ptr<ManualGroup> d1 = std::make_shared<ManualGroup>();
  std::unique_ptr<MeshCommunicator> all = std::make_unique<MeshCommunicator>(
      topology, flat, std::vector<std::shared_ptr<Communicator>>{d0, d1});
  const Schedule one = schedule(topology, {{0, 1}});
  const Schedule both = schedule(topology, {{0, 1}, {1, 0}});
  std::vector<std::vector<float>> memory{std::vector<float>(8)};
  Log log;

  void TearDown() override {
    if (all) all->abort();
    for (auto& group : {flat, d0, d1}) {
      while (group->in_flight() > 0) group->complete();
    }
  }
  Request by(const Schedule& schedule) { return sum_of(memory, schedule); }
  /// What is in flight of the axis groups and of the flat communicator.
  std::vector<size_t> in_flight() const {
    return {d0->in_flight(), d1->in_flight(), flat->in_flight()};
  }
  /// Whether the mesh has of its communicators.
  bool let_go() const {
    return flat.use_count() == 1 && d0.use_count() == 1 && d1.use_count() == 1;
  }
};

using Counts = std::vector<size_t>;

TEST_F(ManualMesh, PhasesWaitForOneAnotherAndForTheirTurn) {
  all->launch(by(both), log("a"));
  all->launch(by(both), log("b"));
  EXPECT_EQ(in_flight(), (Counts{1, 1, 0}));  // what is next on each waits for the other
  d0->complete();
  EXPECT_EQ(in_flight(), (Counts{0, 2, 0}));  // two at a time
  d1->complete(1);                            // chunk 0 is summed up, and goes back
  EXPECT_EQ(in_flight(), (Counts{0, 2, 0}));
  d1->complete(1);
  EXPECT_EQ(in_flight(), (Counts{0, 1, 0})) << "its last phase comes behind those of chunk 1";
  d1->complete();
  EXPECT_EQ(in_flight(), (Counts{1, 0, 0}));
  EXPECT_EQ(log.take(), "");
  while (d0->in_flight() + d1->in_flight() > 0) {
    for (auto& group : {d1, d0}) {
      EXPECT_LE(group->in_flight(), 2U);
      if (group->in_flight() > 0) group->complete(group->in_flight() - 1);
    }
  }
  EXPECT_EQ(log.take(), "b: done\na: done\n") << "the newest phase has been the first to end";
  ASSERT_EQ(d0->requests.size(), 8U);
  const std::vector<Collective> kinds = {Collective::reduce_scatter, Collective::reduce_scatter,
                                         Collective::all_gather, Collective::all_gather};
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(d0->requests[i].kind, kinds[i % 4]) << i;
  // Chunk 0 is the first half, of which the other dimension has the first half.
  EXPECT_EQ(d0->requests[0].recv[0].data, memory[0].data());
  EXPECT_EQ(d0->requests[0].recv[0].count, 4);
  EXPECT_EQ(d1->requests[0].recv[0].data, memory[0].data() + 4);
  EXPECT_EQ(d1->requests[1].recv[0].data, memory[0].data());
  EXPECT_EQ(d1->requests[1].recv[0].count, 2);
}

TEST_F(ManualMesh, WhatIsEmptyIsNotLaunched) {
  memory = {{}, {1}};
  all->launch(by(both), log("a"));
  EXPECT_EQ(in_flight(), (Counts{1, 0, 0})) << "the second chunk has no elements";
  while (d0->in_flight() + d1->in_flight() > 0) (d1->in_flight() ? d1 : d0)->complete();
  EXPECT_EQ(log.take(), "a: done\n");
  for (auto& group : {d0, d1}) {
    EXPECT_EQ(group->requests.size(), 2U);
    for (const Request& request : group->requests) {
      ASSERT_EQ(request.recv.size(), 1U);
      EXPECT_EQ(request.recv[0].data, memory[1].data());
    }
  }
}

TEST_F(ManualMesh, WhatCompletesInLaunchGoesNoDeeperThanThereAreAxisGroups) {
  for (auto& group : {flat, d0, d1}) group->at_once = true;
  const char here = 0;
  for (auto& group : {d0, d1}) group->top = &here;
  std::vector<Route> routes;
  for (int i = 0; i < 2000; ++i) routes.push_back(i % 3 ? Route{0, 1} : Route{1, 0});
  memory[0].resize(20'000);
  const Schedule many = schedule(topology, routes);
  all->launch(by(many), log("a"));
  EXPECT_EQ(d0->requests.size(), 4000U);
  EXPECT_EQ(log.take(), "a: done\n");
  // Nor with completions that launch, when there is nothing to do as well.
  for (int64_t count : {8, 0}) {
    memory[0].resize(static_cast<size_t>(count));
    int left = 5000;
    std::ptrdiff_t deepest = 0;
    std::function<void(std::exception_ptr)> next = [&](const std::exception_ptr& error) {
      const char there = 0;
      deepest = std::max(deepest, std::abs(&there - &here));
      EXPECT_FALSE(error);
      if (--left > 0) all->launch(by(one), next);
    };
    all->launch(by(one), next);
    EXPECT_EQ(left, 0);
    EXPECT_LT(deepest, 50'000);
  }
  EXPECT_LT(d0->deepest, 50'000);
  EXPECT_LT(d1->deepest, 50'000);
}

TEST_F(ManualMesh, FlatRequestsAndThoseWithASchedulePassOneAnother) {
  all->launch(by(one), log("a"));
  all->launch(by(nullptr), log("flat"));
  all->launch(by(one), log("b"));
  EXPECT_EQ(in_flight(), (Counts{1, 0, 1}));
  flat->complete();
  EXPECT_EQ(log.take(), "flat: done\n");
  all->launch(by(nullptr), log("flat"));
  while (d0->in_flight() + d1->in_flight() > 0) (d1->in_flight() ? d1 : d0)->complete();
  EXPECT_EQ(log.take(), "a: done\nb: done\n");
  flat->complete();
  EXPECT_EQ(log.take(), "flat: done\n");
}

TEST_F(ManualMesh, AnErrorOfALineEndsWhatHasASchedule) {
  all->launch(by(both), log("a"));
  all->launch(by(both), log("b"));
  all->launch(by(nullptr), log("flat"));
  d1->complete(0, std::make_exception_ptr(MismatchError("rank 1 differs")));
  const std::string why = ": phase 0 of chunk 1, over dimension 'd1', failed: rank 1 differs\n";
  EXPECT_EQ(log.take(), "b" + why) << "nothing of it is in flight";
  EXPECT_EQ(both.use_count(), 2) << "of that there is nothing left";
  all->launch(by(one), log("c"));
  EXPECT_EQ(log.take(), "c" + why);
  EXPECT_EQ(in_flight(), (Counts{1, 0, 1}));
  d0->complete(0, std::make_exception_ptr(FaultError("late")));
  EXPECT_EQ(log.take(), "a" + why);
  EXPECT_EQ(in_flight(), (Counts{0, 0, 1}));
  flat->complete();
  all->launch(by(nullptr), log("flat"));
  flat->complete(0, std::make_exception_ptr(FaultError("of its own")));
  EXPECT_EQ(log.take(), "flat: done\nflat: of its own\n");
  EXPECT_THROW(all->run(by(one)), FaultError);
}

TEST_F(ManualMesh, WhatIsCompleteAllTheSameIsNoError) {
  all->launch(by(one), log("a"));
  for (int i = 0; i < 3; ++i) (d0->in_flight() ? d0 : d1)->complete();
  EXPECT_EQ(in_flight(), (Counts{1, 0, 0}));
  all->launch(by(one), log("b"));
  EXPECT_EQ(in_flight(), (Counts{2, 0, 0}));
  d0->complete(1, std::make_exception_ptr(FaultError("lost")));
  EXPECT_EQ(log.take(), "b: phase 0 of chunk 0, over dimension 'd0', failed: lost\n");
  d0->complete();
  EXPECT_EQ(log.take(), "a: done\n");
}

TEST_F(ManualMesh, AbortEndsAllOfIt) {
  all->launch(by(both), log("a"));
  all->launch(by(both), log("b"));
  all->launch(by(nullptr), log("flat"));
  all->abort();
  EXPECT_TRUE(flat->aborted && d0->aborted && d1->aborted);
  EXPECT_TRUE(let_go());
  EXPECT_EQ(log.take(), "b: " + kAborted + "\n");
  all->launch(by(one), log("c"));
  all->launch(by(nullptr), log("d"));
  EXPECT_EQ(log.take(), "c: " + kAborted + "\nd: " + kAborted + "\n");
  EXPECT_EQ(in_flight(), (Counts{1, 1, 1}));
  d0->complete();
  EXPECT_EQ(log.take(), "");
  d1->complete();
  EXPECT_EQ(log.take(), "a: " + kAborted + "\n");
  all->abort();
  flat->complete();
  EXPECT_EQ(log.take(), "flat: done\n");
  EXPECT_EQ(all->failure(), "");
  EXPECT_EQ(all->size(), 4);
}

TEST_F(ManualMesh, AnAbortFreesWhoIsInsideALaunch) {
  d0->holds = true;
  std::thread launcher([this] { all->launch(by(one), log("a")); });
  d0->await([this] { return !d0->requests.empty(); });
  all->abort();
  launcher.join();
  EXPECT_TRUE(let_go());
  d0->complete();
  EXPECT_EQ(log.take(), "a: " + kAborted + "\n");
}

// Else it might be left with the last share of it.
TEST_F(ManualMesh, NothingIsLetGoOfWhileAThreadIsInsideALaunch) {
  d0->holds = d0->holds_on = true;
  std::thread launcher([this] { all->launch(by(one), log("a")); });
  d0->await([this] { return !d0->requests.empty(); });
  std::thread aborter([this] { all->abort(); });
  d0->await([this] { return d0->aborted; });
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(d1.use_count(), 2);
  d0->let_on();
  launcher.join();
  aborter.join();
  EXPECT_TRUE(let_go());
}

TEST_F(ManualMesh, DestructionWaitsForWhatIsInFlight) {
  all->launch(by(both), log("a"));
  all->launch(by(both), log("b"));
  all->launch(by(nullptr), log("flat"));
  std::atomic<bool> gone = false;
  std::thread destroyer([&] {
    all.reset();
    gone = true;
  });
  d1->await([this] { return d1->aborted; });
  d0->complete();
  flat->complete();
  EXPECT_EQ(log.take(), "b: " + kDestroyed + "\nflat: done\n");
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(gone);
  d1->complete();
  destroyer.join();
  EXPECT_EQ(log.take(), "a: " + kDestroyed + "\n");
}

TEST_F(ManualMesh, DestructionWaitsForFlatRequests) {
  all->launch(by(nullptr), log("flat"));
  std::atomic<bool> gone = false;
  std::thread destroyer([&] {
    all.reset();
    gone = true;
  });
  flat->await([this] { return flat->aborted; });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(gone);
  flat->complete();
  destroyer.join();
}

TEST_F(ManualMesh, DestructionWaitsForACompletionThatRuns) {
  std::promise<void> inside, go_on;
  std::atomic<bool> gone = false, returned = false;
  all->launch(by(one), log("a", [&] {
                inside.set_value();
                go_on.get_future().get();
                returned = true;
              }));
  std::thread completer([this] {
    for (int i = 0; i < 4; ++i) (d0->in_flight() ? d0 : d1)->complete();
  });
  inside.get_future().get();
  std::thread destroyer([&] {
    all.reset();
    EXPECT_TRUE(returned);
    gone = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(gone);
  go_on.set_value();
  destroyer.join();
  completer.join();
}

TEST_F(ManualMesh, ACompletionMayDestroyIt) {
  all->launch(by(one), log("a", [this] { all.reset(); }));
  all->launch(by(one), log("b"));
  all->launch(by(one), log("c"));
  all->launch(by(nullptr), log("flat"));
  d0->complete();
  d1->complete();
  d1->complete();
  EXPECT_EQ(in_flight(), (Counts{2, 0, 1}));  // the last of a, the first of b
  d0->complete();
  EXPECT_EQ(log.take(), "a: done\nc: " + kDestroyed + "\n");
  EXPECT_FALSE(all);
  EXPECT_TRUE(let_go());
  d0->complete();
  flat->complete();
  EXPECT_EQ(log.take(), "b: " + kDestroyed + "\nflat: done\n");
}

TEST_F(ManualMesh, SoMayThoseOfFlatRequestsAndOfRefusedOnes) {
  all->launch(by(one), log("a"));
  all->launch(by(nullptr), log("flat", [this] { all.reset(); }));
  flat->complete();
  EXPECT_FALSE(all);
  d0->complete();
  EXPECT_EQ(log.take(), "flat: done\na: " + kDestroyed + "\n");
  all = std::make_unique<MeshCommunicator>(topology, flat,
                                           std::vector<std::shared_ptr<Communicator>>{d0, d1});
  Request bad = by(one);
  bad.scale = 2;
  all->launch(bad, [this](const std::exception_ptr&) { all.reset(); });
  EXPECT_FALSE(all);
}

// Inside the launch of the one on whose axis group it is.
TEST_F(ManualMesh, ACompletionInsideALaunchMayDestroyIt) {
  for (auto& group : {d0, d1}) group->at_once = true;
  all->launch(by(both), log("a", [this] { all.reset(); }));
  EXPECT_EQ(log.take(), "a: done\n");
  EXPECT_FALSE(all);
  EXPECT_TRUE(let_go());
}

// Its last share is then with whom is inside, and a phase of another request in flight on it.
TEST_F(ManualMesh, AndTheLineThatItIsInside) {
  ManualGroup& group = *d0;
  all = nullptr;
  all = std::make_unique<MeshCommunicator>(
      topology, flat, std::vector<std::shared_ptr<Communicator>>{std::move(d0), d1});
  d0 = std::make_shared<ManualGroup>();
  group.fails_at = 3;
  all->launch(by(one), log("a"));
  all->launch(by(one), log("b", [this] { all.reset(); }));
  group.complete();
  d1->complete();
  d1->complete();
  const std::string why = ": phase 0 of chunk 0, over dimension 'd0', failed: no route\n";
  EXPECT_EQ(log.take(), "b" + why + "a" + why);
  EXPECT_TRUE(let_go());
}

TEST_F(ManualMesh, ACompletionInsideAnAbortMayDestroyIt) {
  all->launch(by(one), log("a"));
  all->launch(by(one), log("b", [this] { all.reset(); }));
  all->abort();
  EXPECT_FALSE(all);
  EXPECT_TRUE(let_go());
  d0->complete();
  EXPECT_EQ(log.take(), "b: " + kAborted + "\na: " + kAborted + "\n");
}

TEST_F(ManualMesh, ACompletionMayAbortIt) {
  all->launch(by(one), log("a", [this] { all->abort(); }));
  all->launch(by(one), log("b"));
  while (d0->in_flight() < 2 || d1->in_flight() > 0) (d1->in_flight() ? d1 : d0)->complete();
  d0->complete();
  EXPECT_EQ(log.take(), "a: done\n");
  d0->complete();
  EXPECT_EQ(log.take(), "b: " + kAborted + "\n");
}

TEST_F(ManualMesh, CompletionsMayOwnIt) {
  for (auto& group : {flat, d0, d1}) group->keeps = true;
  std::shared_ptr<MeshCommunicator> mine = std::move(all);
  std::weak_ptr<MeshCommunicator> watch = mine;
  for (const Schedule& how : {one, Schedule()}) {
    mine->launch(by(how), [mine](const std::exception_ptr&) {});
  }
  mine.reset();
  flat->complete();
  EXPECT_FALSE(watch.expired());
  for (int i = 0; i < 4; ++i) (d0->in_flight() ? d0 : d1)->complete();
  EXPECT_TRUE(watch.expired());
  EXPECT_TRUE(let_go());
}

// The other ranks launch nothing, but their axis groups and flat ones are there until the test
// ends.
TEST(MeshCommunicatorEnd, LinesOfItsOwnFailWhatTheyHaveInFlight) {
  const Topology topology = mesh({2, 3});
  for (const bool by_abort : {true, false}) {
    Meshes ranks = communicators(topology);
    Log log;
    std::vector<std::vector<float>> memory(1, std::vector<float>(100));
    const Schedule both = schedule(topology, {{0, 1}, {1, 0}});
    for (const Schedule& how : {both, Schedule(), both}) {
      ranks[0]->launch(sum_of(memory, how), log("x"));
    }
    if (by_abort) {
      ranks[0]->abort();
    } else {
      ranks[0].reset();
    }
    const std::string text = log.take(), why = "x: " + (by_abort ? kAborted : kDestroyed) + "\n";
    EXPECT_NE(text.find(why), std::string::npos) << text;
    EXPECT_NE(text.find(why, text.find(why) + 1), std::string::npos) << text;
    EXPECT_NE(text.find("call 0 (all_reduce) cannot complete"), std::string::npos) << text;
    EXPECT_EQ(std::ranges::count(text, '\n'), 3) << text;
  }
}

// Rank 3 goes at once; rank 0, on none of its axis groups, learns of it as ranks 1 and 2 go.
TEST(MeshCommunicatorEnd, ALostRankIsAFaultThatNamesTheDimension) {
  const Topology topology = mesh({2, 2});
  Meshes ranks = communicators(topology);
  const Schedule both = schedule(topology, {{0, 1}, {1, 0}});
  on_each_rank(4, [&](int rank) {
    auto& mine = ranks[static_cast<size_t>(rank)];
    if (rank == 3) return mine.reset();
    std::vector<std::vector<float>> data(1, std::vector<float>(100));
    const Request request = sum_of(data, both);
    Pending first(*mine, request), second(*mine, request);
    const std::string what = message_of<FaultError>([&] { first.get(); });
    EXPECT_NE(what.find("over dimension 'd"), std::string::npos) << what;
    EXPECT_EQ(message_of<FaultError>([&] { second.get(); }), what);
    EXPECT_EQ(message_of<FaultError>([&] { mine->run(request); }), what);
    mine.reset();
  });
}

TEST(MeshCommunicatorEnd, CompletionsMayDestroyThoseOfAllRanks) {
  const Topology topology = mesh({2, 2});
  const Schedule both = schedule(topology, {{0, 1}, {1, 0}});
  for (int i = 0; i < 50; ++i) {
    Meshes ranks = communicators(topology);
    std::latch launched(1);
    std::atomic<int> completed = 0;
    std::vector<std::vector<std::vector<float>>> memory(
        12, std::vector<std::vector<float>>(1, std::vector<float>(100)));
    for (size_t at = 0; at < 12; ++at) {
      auto& mine = ranks[at / 3];
      mine->launch(sum_of(memory[at], at % 3 == 1 ? nullptr : both),
                   [&, at, i](const std::exception_ptr&) {
                     launched.wait();
                     if (static_cast<int>(at) % 3 == i % 3) mine.reset();
                     ++completed;
                   });
    }
    launched.count_down();
    while (completed < 12) std::this_thread::yield();
  }
}

// Each rank launches as many as it likes, ends in one way or another, and then frees what phases
// that come late would touch.
TEST(MeshCommunicatorEnd, HoweverItEndsEveryRequestCompletesOnce) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random setup(seed);
    std::vector<int> sizes(static_cast<size_t>(setup(1, 3)));
    for (int& size : sizes) size = static_cast<int>(setup(1, 3));
    const Topology topology = mesh(sizes);
    std::atomic<uint64_t> late_seed = seed;
    Meshes ranks = communicators(topology, setup.one_in(2) ? late(late_seed) : Wrap());
    std::vector<Schedule> schedules{nullptr};
    for (int i = 0; i < 3; ++i) schedules.push_back(random_schedule(topology, setup));
    std::atomic<int> launched = 0, completed = 0;
    on_each_rank(topology.ranks(), [&](int rank) {
      Random which(seed), random(seed * 100 + static_cast<uint64_t>(rank));
      std::unique_ptr<MeshCommunicator> owner = std::move(ranks[static_cast<size_t>(rank)]);
      MeshCommunicator& mine = *owner;
      std::vector<std::vector<std::vector<float>>> memory(
          static_cast<size_t>(random(0, 20)),
          std::vector<std::vector<float>>(1, std::vector<float>(200)));
      // The next one goes when the one before is over, in whatever order on other ranks.
      std::function<void(std::vector<std::vector<float>>&, Schedule, int)> launch =
          [&](auto& data, const Schedule& how, int times) {
            ++launched;
            mine.launch(sum_of(data, how), [&, how, times](const std::exception_ptr& error) {
              if (!error && times > 1) launch(data, how, times - 1);
              ++completed;
            });
          };
      std::thread aborter;
      for (auto& data : memory) {
        launch(data, schedules[static_cast<size_t>(which(0, 3))], random.one_in(8) ? 3 : 1);
        if (random.one_in(10)) std::this_thread::sleep_for(100us);
        if (random.one_in(30) && !aborter.joinable()) aborter = std::thread([&] { mine.abort(); });
      }
      if (aborter.joinable()) aborter.join();
      owner.reset();
    });
    EXPECT_EQ(completed, launched);
  }
}

}  // namespace
}  // namespace usbyte
