// SPDX-License-Identifier: Apache-2.0
#include "cuda/emulation/emulated_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "ranks.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::message_of;
using test::Random;

constexpr double kShort = 0.01;    // s
constexpr double kEndless = 3600;  // s; until the emulation ends
constexpr DType kInt = DType::int32;

class EmulatedCudaTest : public testing::Test {
 protected:
  std::shared_ptr<EmulatedCuda> cuda = make_emulated_cuda();
  CudaStream first = cuda->create_stream(false);
  CudaStream second = cuda->create_stream(true);
  CudaEvent event = cuda->create_event(EventKind::ordering);

  // Nothing later on `first` runs before `go_on`.
  void hold_first() {
    cuda->enqueue(first, [gate = gate_] { gate->wait(); });
  }
  void go_on() { gate_->count_down(); }

 private:
  std::shared_ptr<std::latch> gate_ = std::make_shared<std::latch>(1);
};

TEST_F(EmulatedCudaTest, AStreamKeepsItsOrder) {
  const auto late = make_emulated_cuda({.most_delay_s = 1e-4, .seed = 3});
  const CudaStream stream = late->create_stream(false);
  std::vector<int> seen;  // of the stream until it is synchronised
  for (int i = 0; i < 50; ++i) late->enqueue(stream, [&seen, i] { seen.push_back(i); });
  late->synchronize(stream);
  ASSERT_EQ(seen.size(), 50U);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
}

TEST_F(EmulatedCudaTest, WithoutAnEventAnotherStreamSeesOldData) {
  std::atomic<int> data = 1;
  int seen = 0;
  cuda->delay(first, kEndless);
  cuda->enqueue(first, [&] { data = 2; });
  cuda->enqueue(second, [&] { seen = data; });
  cuda->synchronize(second);
  EXPECT_EQ(seen, 1);
  cuda.reset();
  EXPECT_EQ(data, 2);
}

TEST_F(EmulatedCudaTest, AnEventOrdersStreams) {
  int data = 1;
  int seen = 0;
  hold_first();
  cuda->enqueue(first, [&] { data = 2; });
  cuda->record(event, first);
  cuda->wait(second, event);
  cuda->enqueue(second, [&] { seen = data; });
  EXPECT_FALSE(cuda->passed(event));
  EXPECT_EQ(cuda->host_waits(), 0);
  go_on();
  cuda->synchronize(second);
  EXPECT_TRUE(cuda->passed(event));
  EXPECT_EQ(seen, 2);
}

TEST_F(EmulatedCudaTest, AWaitRefersToTheRecordBeforeIt) {
  std::atomic<bool> over = false;
  cuda->record(event, first);
  cuda->wait(second, event);
  hold_first();
  cuda->enqueue(first, [&] { over = true; });
  cuda->record(event, first);  // must not hold `second` up
  cuda->synchronize(second);
  EXPECT_FALSE(over);
  EXPECT_FALSE(cuda->passed(event));
  go_on();
  cuda->synchronize(event);
  EXPECT_TRUE(over);
}

TEST_F(EmulatedCudaTest, AnEventThatWasNeverRecordedHasPassed) {
  EXPECT_TRUE(cuda->passed(event));
  cuda->synchronize(event);
  cuda->wait(first, event);
  cuda->wait({}, event);
  cuda->synchronize(first);
  EXPECT_EQ(cuda->host_waits(), 0);
}

TEST_F(EmulatedCudaTest, AWaitOutlivesItsEvent) {
  int data = 1;
  int seen = 0;
  hold_first();
  cuda->enqueue(first, [&] { data = 2; });
  cuda->record(event, first);
  cuda->wait(second, event);
  cuda->destroy(event);
  cuda->enqueue(second, [&] { seen = data; });
  go_on();
  cuda->synchronize(second);
  EXPECT_EQ(seen, 2);
}

TEST_F(EmulatedCudaTest, StreamZeroIsTheCaller) {
  bool ran = false;
  cuda->enqueue({}, [&ran, caller = std::this_thread::get_id()] {
    ran = std::this_thread::get_id() == caller;
  });
  EXPECT_TRUE(ran);
  cuda->record(event, {});
  EXPECT_TRUE(cuda->passed(event));

  int data = 1;
  cuda->delay(first, kShort);
  cuda->enqueue(first, [&] { data = 2; });
  cuda->record(event, first);
  EXPECT_EQ(cuda->host_waits(), 0);
  cuda->wait({}, event);
  EXPECT_EQ(data, 2);
  EXPECT_EQ(cuda->host_waits(), 1);
  cuda->wait({}, event);
  EXPECT_EQ(cuda->host_waits(), 1) << "it had passed";
}

TEST_F(EmulatedCudaTest, HostWaitsCountsOnlyRealOnes) {
  cuda->synchronize(first);
  EXPECT_EQ(cuda->host_waits(), 0);
  cuda->delay(first, kShort);
  cuda->record(event, first);
  cuda->synchronize(event);
  EXPECT_EQ(cuda->host_waits(), 1);
  cuda->synchronize(event);
  EXPECT_EQ(cuda->host_waits(), 1);
  cuda->delay(first, kShort);
  cuda->synchronize(first);
  EXPECT_EQ(cuda->host_waits(), 2);
}

TEST_F(EmulatedCudaTest, ACopyReadsItsSourceInStreamOrder) {
  constexpr size_t kBytes = 1000;
  auto* device = static_cast<unsigned char*>(cuda->allocate(kBytes));
  auto* pinned = static_cast<unsigned char*>(cuda->allocate_pinned(kBytes));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(device) % 256, 0U);
  for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(device[i], 0xCD) << "memory must not be zero";
  hold_first();
  cuda->enqueue(first, [=] { std::memset(device, 7, kBytes); });
  cuda->copy(pinned, device, kBytes, first);
  cuda->copy(pinned, device, 0, first);
  EXPECT_EQ(cuda->host_waits(), 0);
  go_on();
  cuda->synchronize(first);
  EXPECT_EQ(pinned[0], 7);
  EXPECT_EQ(pinned[kBytes - 1], 7);
  cuda->free(device);
  cuda->free_pinned(pinned);
}

TEST_F(EmulatedCudaTest, KernelsTakeTheirArgumentsAtOnce) {
  int from = 5;
  int to = 0;
  std::vector<CopySegment> segments = {{&from, &to, 1}};
  hold_first();
  cuda->copy_segments(segments, kInt, kInt, 1, first);
  segments[0] = {};
  go_on();
  cuda->synchronize(first);
  EXPECT_EQ(to, 5);
  cuda->fill(&to, kInt, 1, 9, first);
  cuda->synchronize(first);
  EXPECT_EQ(to, 9);
}

TEST_F(EmulatedCudaTest, TimedEventsTellTheTimeBetweenThem) {
  const CudaEvent begin = cuda->create_event(EventKind::timed);
  const CudaEvent end = cuda->create_event(EventKind::timed);
  cuda->record(begin, first);
  cuda->delay(first, kShort);
  cuda->record(end, first);
  EXPECT_NE(message_of<FaultError>([&] { cuda->elapsed_s(begin, end); }).find("not passed"),
            std::string::npos);
  cuda->synchronize(end);
  EXPECT_GE(cuda->elapsed_s(begin, end), kShort);
  EXPECT_LE(cuda->elapsed_s(end, begin), -kShort);
  cuda->record(event, first);
  cuda->synchronize(event);
  EXPECT_NE(message_of<FaultError>([&] { cuda->elapsed_s(begin, event); }).find("timing"),
            std::string::npos);
}

TEST_F(EmulatedCudaTest, CapturingIsWhatTheTestSays) {
  EXPECT_FALSE(cuda->capturing(first));
  cuda->set_capturing(first, true);
  cuda->set_capturing({}, true);
  EXPECT_TRUE(cuda->capturing(first));
  EXPECT_TRUE(cuda->capturing({}));
  EXPECT_FALSE(cuda->capturing(second));
  cuda->set_capturing(first, false);
  EXPECT_FALSE(cuda->capturing(first));
}

TEST_F(EmulatedCudaTest, EventsOfACaptureCannotBeAskedFor) {
  cuda->set_capturing(first, true);
  cuda->record(event, first);
  cuda->set_capturing(first, false);
  EXPECT_NE(message_of<FaultError>([&] { cuda->passed(event); }).find("capture"),
            std::string::npos);
  EXPECT_NE(message_of<FaultError>([&] { cuda->synchronize(event); }).find("capture"),
            std::string::npos);
  cuda->record(event, first);
  cuda->synchronize(event);
  EXPECT_TRUE(cuda->passed(event));
}

TEST_F(EmulatedCudaTest, LiveCountsWhatWasNotGivenBack) {
  EXPECT_EQ(cuda->live(), 3);
  void* device = cuda->allocate(1);
  void* pinned = cuda->allocate_pinned(1);
  EXPECT_EQ(cuda->live(), 5);
  cuda->free(device);
  cuda->free_pinned(pinned);
  cuda->free(nullptr);
  cuda->destroy(first);
  cuda->destroy(second);
  cuda->destroy(event);
  EXPECT_EQ(cuda->live(), 0);
}

TEST_F(EmulatedCudaTest, PoisonFailsEveryCallButThoseThatGiveBack) {
  void* memory = cuda->allocate(1);
  cuda->poison("device lost");
  cuda->poison("later");
  const std::vector<std::function<void()>> calls = {[&] { cuda->create_stream(true); },
                                                    [&] { cuda->create_event(EventKind::timed); },
                                                    [&] { cuda->record(event, first); },
                                                    [&] { cuda->wait(first, event); },
                                                    [&] { cuda->passed(event); },
                                                    [&] { cuda->synchronize(event); },
                                                    [&] { cuda->synchronize(first); },
                                                    [&] { cuda->allocate(1); },
                                                    [&] { cuda->capturing(first); },
                                                    [&] { cuda->copy(memory, memory, 1, first); },
                                                    [&] { cuda->fill(memory, kInt, 0, 0, first); }};
  for (const auto& call : calls) EXPECT_EQ(message_of<FaultError>(call), "device lost");
  cuda->free(memory);
  cuda->destroy(first);
  EXPECT_EQ(cuda->live(), 2);
}

TEST_F(EmulatedCudaTest, MisuseIsAnError) {
  cuda->destroy(event);
  EXPECT_NE(message_of<FaultError>([&] { cuda->record(event, first); }).find("no event"),
            std::string::npos);
  cuda->destroy(first);
  EXPECT_NE(message_of<FaultError>([&] { cuda->synchronize(first); }).find("no stream"),
            std::string::npos);
  void* memory = cuda->allocate(1);
  cuda->free(memory);
  EXPECT_FALSE(cuda->capturing(second));
  cuda->free(memory);  // cannot throw; the next call does
  EXPECT_NE(message_of<FaultError>([&] { cuda->capturing(second); }).find("free already"),
            std::string::npos);
}

TEST_F(EmulatedCudaTest, WorkThatThrowsIsAStickyError) {
  cuda->delay(first, kShort);
  cuda->enqueue(first, [] { throw std::runtime_error("illegal address"); });
  for (int i = 0; i < 2; ++i) {
    EXPECT_NE(message_of<FaultError>([&] { cuda->synchronize(first); }).find("illegal address"),
              std::string::npos);
  }
}

TEST_F(EmulatedCudaTest, WorkOnADestroyedStreamRunsAndTheEndIsPrompt) {
  std::atomic<int> ran = 0;
  cuda->delay(first, 3600);
  cuda->enqueue(first, [&] { ++ran; });
  cuda->record(event, first);
  cuda->destroy(first);
  cuda->wait(second, event);
  cuda->enqueue(second, [&] { ++ran; });
  cuda.reset();
  EXPECT_EQ(ran, 2);
}

// Random work on random streams, each reading what an event has ordered before it; wrong order is a
// wrong sum here and a race under ThreadSanitizer.
TEST(EmulatedCudaPropertyTest, ChainsOfEventsKeepOrder) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    const auto cuda = make_emulated_cuda({.most_delay_s = 2e-5, .seed = seed});
    std::vector<CudaStream> streams;
    for (int s = 0; s < 4; ++s) streams.push_back(cuda->create_stream(random.one_in(2)));
    const CudaEvent event =
        cuda->create_event(EventKind::ordering);  // one for all: waits refer to records
    int64_t value = 0, want = 0;
    for (int i = 0; i < 200; ++i) {
      const CudaStream stream = streams[static_cast<size_t>(random(0, 3))];
      const int64_t factor = random(1, 5);
      cuda->wait(stream, event);
      cuda->enqueue(stream, [&value, factor] { value = value * factor % 1'000'003 + 1; });
      cuda->record(event, stream);
      want = want * factor % 1'000'003 + 1;
    }
    cuda->synchronize(event);
    EXPECT_EQ(value, want) << "seed " << seed;
  }
}

}  // namespace
}  // namespace usbyte
