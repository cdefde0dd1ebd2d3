// SPDX-License-Identifier: Apache-2.0
#include "cuda/event_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "cuda/emulation/emulated_cuda.h"

namespace usbyte {
namespace {

class EventPoolTest : public testing::Test {
 protected:
  std::shared_ptr<EmulatedCuda> cuda = make_emulated_cuda();
  std::optional<EventPool> pool{cuda};
};

TEST_F(EventPoolTest, MakesNoMoreEventsThanAreInUseAtOnce) {
  EXPECT_EQ(cuda->live(), 0);
  for (int i = 0; i < 10; ++i) {
    const PooledEvent a = pool->acquire(EventKind::ordering);
    const PooledEvent b = pool->acquire(EventKind::ordering);
    EXPECT_NE(a.get(), b.get());
  }
  EXPECT_EQ(cuda->live(), 2);
  pool.reset();
  EXPECT_EQ(cuda->live(), 0);
}

TEST_F(EventPoolTest, TheLastCopyGivesTheEventBack) {
  PooledEvent first = pool->acquire(EventKind::ordering);
  const CudaEvent event = first.get();
  PooledEvent copy = first;
  first = {};
  EXPECT_FALSE(first);
  EXPECT_NE(pool->acquire(EventKind::ordering).get(), event);
  copy = {};
  const PooledEvent a = pool->acquire(EventKind::ordering);
  const PooledEvent b = pool->acquire(EventKind::ordering);
  EXPECT_TRUE(a.get() == event || b.get() == event);
  EXPECT_EQ(cuda->live(), 2);
}

TEST_F(EventPoolTest, OnlyTimedEventsTellTheTime) {
  const CudaStream stream = cuda->create_stream(false);
  {
    const PooledEvent other = pool->acquire(EventKind::ordering);
  }
  const PooledEvent begin = pool->acquire(EventKind::timed);
  const PooledEvent end = pool->acquire(EventKind::timed);
  cuda->record(begin.get(), stream);
  cuda->record(end.get(), stream);
  cuda->synchronize(end.get());
  EXPECT_GE(cuda->elapsed_s(begin.get(), end.get()), 0);
  cuda->destroy(stream);
}

TEST_F(EventPoolTest, AnEventMayOutliveThePool) {
  PooledEvent event = pool->acquire(EventKind::ordering);
  pool.reset();
  EXPECT_TRUE(cuda->passed(event.get()));
  EXPECT_EQ(cuda->live(), 1);
  event = {};
  EXPECT_EQ(cuda->live(), 0);
}

TEST_F(EventPoolTest, NoTwoThreadsHaveTheSameEvent) {
  constexpr int kThreads = 4;
  std::vector<std::atomic<int>> users(kThreads * 2 + 1);  // by handle; each thread has two at most
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        const PooledEvent a = pool->acquire(EventKind::ordering);
        const PooledEvent b = pool->acquire(EventKind::ordering);
        for (const PooledEvent& e : {a, b}) EXPECT_EQ(users.at(e.get().handle).fetch_add(1), 0);
        for (const PooledEvent& e : {a, b}) users.at(e.get().handle).fetch_sub(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(cuda->live(), kThreads * 2);
}

}  // namespace
}  // namespace usbyte
