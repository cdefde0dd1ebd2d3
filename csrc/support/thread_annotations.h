// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

// Clang's thread-safety analysis (-Wthread-safety) checks these; `make thread-safety` runs it.
// Other compilers see nothing.
#if defined(__clang__)
#define USBYTE_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define USBYTE_THREAD_ATTRIBUTE(x)
#endif

#define USBYTE_CAPABILITY(name) USBYTE_THREAD_ATTRIBUTE(capability(name))
#define USBYTE_SCOPED_CAPABILITY USBYTE_THREAD_ATTRIBUTE(scoped_lockable)
#define USBYTE_GUARDED_BY(x) USBYTE_THREAD_ATTRIBUTE(guarded_by(x))
#define USBYTE_REQUIRES(...) USBYTE_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define USBYTE_EXCLUDES(...) USBYTE_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define USBYTE_ACQUIRE(...) USBYTE_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define USBYTE_RELEASE(...) USBYTE_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define USBYTE_ASSERT_CAPABILITY(x) USBYTE_THREAD_ATTRIBUTE(assert_capability(x))

namespace usbyte {

/// A std::mutex that the analysis knows.
class USBYTE_CAPABILITY("mutex") Mutex {
 public:
  void lock() USBYTE_ACQUIRE() { mutex_.lock(); }
  void unlock() USBYTE_RELEASE() { mutex_.unlock(); }
  /// Does nothing. Tells the analysis that the caller holds the mutex where it cannot see that, as
  /// in a lambda.
  void assume_held() const USBYTE_ASSERT_CAPABILITY(this) {}

 private:
  friend class ConditionVariable;
  std::mutex mutex_;
};

/// Holds a mutex while it lives.
class USBYTE_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) USBYTE_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() USBYTE_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

/// Releases a mutex that the caller holds, and takes it again when it ends.
class USBYTE_SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) USBYTE_RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~MutexUnlock() USBYTE_RELEASE() { mutex_.lock(); }  // releases the release
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

/// A std::condition_variable for a Mutex. Waits may end early: callers loop over their condition,
/// which the analysis then sees under the lock.
class ConditionVariable {
 public:
  void wait(Mutex& mutex) USBYTE_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    variable_.wait(lock);
    lock.release();
  }
  template <typename Clock, typename Duration>
  std::cv_status wait_until(Mutex& mutex, std::chrono::time_point<Clock, Duration> deadline)
      USBYTE_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = variable_.wait_until(lock, deadline);
    lock.release();
    return status;
  }
  template <typename Rep, typename Period>
  std::cv_status wait_for(Mutex& mutex, std::chrono::duration<Rep, Period> duration)
      USBYTE_REQUIRES(mutex) {
    return wait_until(mutex, std::chrono::steady_clock::now() + duration);
  }
  void notify_one() { variable_.notify_one(); }
  void notify_all() { variable_.notify_all(); }

 private:
  std::condition_variable variable_;
};

/// Says that only one thread, or one at a time, runs some code and uses some data, where no mutex
/// is needed for that. Exists for the analysis alone.
class USBYTE_CAPABILITY("role") ThreadRole {
 public:
  /// Called where the code of that thread begins.
  void assume() const USBYTE_ASSERT_CAPABILITY(this) {}
};

}  // namespace usbyte
