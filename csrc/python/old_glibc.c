/* SPDX-License-Identifier: Apache-2.0 */
/* What libstdc++ takes from glibc releases newer than the one that cmake/OldGlibc.cmake links for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

/* Since 2.32. False is right for each program: it only selects atomic operations. */
char __libc_single_threaded = 0;

/* Since 2.36. */
uint32_t arc4random(void) {
  uint32_t value;
  char* at = (char*)&value;
  size_t left = sizeof value;
  while (left > 0) {
    const ssize_t got = getrandom(at, left, 0);
    if (got < 0 && errno != EINTR) abort();
    if (got > 0) {
      at += got;
      left -= (size_t)got;
    }
  }
  return value;
}

typedef int (*ClockWait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
static ClockWait system_wait;
static pthread_once_t found = PTHREAD_ONCE_INIT;
#ifndef USBYTE_CLOCKWAIT  /* Tests name a symbol that no glibc has. */
#define USBYTE_CLOCKWAIT "pthread_cond_clockwait"
#endif
static void find(void) { *(void**)&system_wait = dlsym(RTLD_DEFAULT, USBYTE_CLOCKWAIT); }

static int64_t nanoseconds(const struct timespec* time) {
  return (int64_t)time->tv_sec * 1000000000 + time->tv_nsec;
}

/* Since 2.30. Before it, only the clock of the condition variable can be waited for, which is
 * CLOCK_REALTIME in C++. A wait ended early by a change of that clock looks like a spurious one. */
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  struct timespec here, real;
  pthread_once(&found, find);
  if (system_wait != NULL) return system_wait(condition, mutex, clock, until);
  if (clock == CLOCK_REALTIME) return pthread_cond_timedwait(condition, mutex, until);
  if (clock_gettime(clock, &here) != 0 || clock_gettime(CLOCK_REALTIME, &real) != 0) return errno;
  const int64_t left = nanoseconds(until) - nanoseconds(&here);
  if (left <= 0) return ETIMEDOUT;
  /* A waiter may wake too early: so a clock that is set back does not delay one for long. */
  const int64_t most = 1000000000;
  const int64_t deadline = nanoseconds(&real) + (left < most ? left : most);
  real.tv_sec = (time_t)(deadline / 1000000000);
  real.tv_nsec = (long)(deadline % 1000000000);
  const int result = pthread_cond_timedwait(condition, mutex, &real);
  if (result == ETIMEDOUT && clock_gettime(clock, &here) == 0 &&
      nanoseconds(&here) < nanoseconds(until)) {
    return 0;
  }
  return result;
}
