// SPDX-License-Identifier: Apache-2.0
// csrc/python/old_glibc.c as on a glibc before 2.30. CMakeLists.txt renames its functions.
#include <gtest/gtest.h>
#include <pthread.h>

#include <cerrno>
#include <cstdint>
#include <ctime>
#include <set>
#include <thread>

extern "C" std::uint32_t usbyte_arc4random();
extern "C" int usbyte_clockwait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);

namespace {

std::int64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return std::int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

struct Waiter {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;

  int wait(clockid_t clock, std::int64_t until) {
    const timespec time{.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    return usbyte_clockwait(&condition, &mutex, clock, &time);
  }
};

TEST(OldGlibc, TimesOutAtTheDeadlineOfEachClock) {
  for (const clockid_t clock : {CLOCK_MONOTONIC, CLOCK_REALTIME}) {
    Waiter waiter;
    pthread_mutex_lock(&waiter.mutex);
    const std::int64_t until = nanoseconds(clock) + 20000000;
    int result = 0;
    while (result == 0) result = waiter.wait(clock, until);
    EXPECT_EQ(result, ETIMEDOUT);
    EXPECT_GE(nanoseconds(clock), until);
    EXPECT_EQ(waiter.wait(clock, nanoseconds(clock) - 1), ETIMEDOUT);
    pthread_mutex_unlock(&waiter.mutex);
  }
}

TEST(OldGlibc, IsWokenBeforeTheDeadline) {
  Waiter waiter;
  bool ready = false;
  std::thread waker([&] {
    pthread_mutex_lock(&waiter.mutex);
    ready = true;
    pthread_cond_signal(&waiter.condition);
    pthread_mutex_unlock(&waiter.mutex);
  });
  pthread_mutex_lock(&waiter.mutex);
  const std::int64_t until = nanoseconds(CLOCK_MONOTONIC) + 300000000000;
  int result = 0;
  while (!ready && result == 0) result = waiter.wait(CLOCK_MONOTONIC, until);
  EXPECT_EQ(result, 0);
  EXPECT_TRUE(ready);
  pthread_mutex_unlock(&waiter.mutex);
  waker.join();
}

TEST(OldGlibc, RandomNumbersDiffer) {
  std::set<std::uint32_t> drawn;
  for (int i = 0; i < 100; ++i) drawn.insert(usbyte_arc4random());
  EXPECT_GE(drawn.size(), 99u);
}

}  // namespace
