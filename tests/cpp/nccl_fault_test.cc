// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::FakeNcclOptions;
using test::message_of;
using test::NcclRig;
using test::on_each_rank;
using test::OrderEvents;
using test::Pending;

Request sum_of(std::vector<float>& values) {
  return {Collective::all_reduce,
          DType::float32,
          ReduceOp::sum,
          0,
          {},
          {{values.data(), static_cast<int64_t>(values.size())}}};
}

void expect_in(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  }
}

TEST(NcclFault, RanksThatDoNotComeEndInAnErrorThatSaysWhatToDo) {
  NcclRig rig(3, 2);
  on_each_rank(2, [&](int rank) {
    expect_in(message_of<FaultError>([&] { rig.make(rank, {.init_timeout_s = 0.05}); }),
              {"rank " + std::to_string(rank) + ": NCCL communicator 0 of 2", "no progress",
               "3 ranks", "NCCL_SOCKET_IFNAME"});
  });
  EXPECT_EQ(rig.nccl().aborted(), 2);
}

TEST(NcclFault, ARankThatCannotStartSaysWhyAndTheOthersDoNotHang) {
  NcclRig rig(2, 1, {.init_fails_on = 1});
  on_each_rank(2, [&](int rank) {
    const std::string error =
        message_of<FaultError>([&] { rig.make(rank, {.init_timeout_s = 0.05}); });
    expect_in(error, {"rank " + std::to_string(rank)});
    if (rank == 1) expect_in(error, {"fake error 2 (last words)"});
  });
  EXPECT_EQ(rig.nccl().aborted(), 2);
}

TEST(NcclFault, SetupMayTakeItsTime) {
  NcclRig rig(2, 3, {.polls = 20});
  rig.on_each([](int, NcclCommunicator& communicator) { EXPECT_EQ(communicator.failure(), ""); });
  EXPECT_EQ(rig.nccl().aborted(), 0);
}

// Launches wait across slots for one that hangs: communicators that were aborted one after the
// other would wait for each other too.
TEST(NcclFault, AbortEndsWhatHangsOnAllSlots) {
  NcclRig rig(2, 3, {.hangs_from = 1});
  on_each_rank(2, [&](int rank) {
    const auto communicator = rig.make(rank);
    Cuda& cuda = rig.device(rank);
    std::vector<std::vector<float>> values(9, std::vector<float>(4));
    std::vector<std::unique_ptr<OrderEvents>> events;
    for (size_t i = 0; i < values.size(); ++i) {
      events.push_back(std::make_unique<OrderEvents>(cuda, std::vector<CudaEvent>{}));
      Request request = sum_of(values[i]);
      request.window_bytes = 32;
      request.order = events.back()->order();
      Pending(*communicator, request).get();
    }
    rig.nccl().await_on_device(2);
    EXPECT_FALSE(cuda.passed(events.back()->order().done));
    EXPECT_EQ(communicator->failure(), "");
    std::thread([&] { communicator->abort(); }).join();
    communicator->abort();
    for (const auto& e : events) cuda.synchronize(e->order().done);
    expect_in(communicator->failure(), {"rank " + std::to_string(rank), "aborted"});
    expect_in(message_of<FaultError>([&] { communicator->run(sum_of(values[0])); }), {"aborted"});
  });
  EXPECT_EQ(rig.nccl().aborted(), 6);
}

// What a request's memory is used for after its completion must not be NCCL's any more.
TEST(NcclFault, EveryAbortWaitsForTheFirst) {
  NcclRig rig(1, 2, {.abort_s = 0.2});
  const auto communicator = rig.make(0);
  std::thread first([&] { communicator->abort(); });
  while (rig.nccl().aborted() < 2) std::this_thread::yield();
  communicator->abort();
  EXPECT_EQ(rig.nccl().live(), 0);
  first.join();
}

TEST(NcclFault, AbortReleasesWhoeverWaitsForNcclToLaunch) {
  NcclRig rig(1, 1, {.launch_hangs = true});
  const auto communicator = rig.make(0);
  std::atomic<bool> launching = false;
  std::thread thread([&] {
    std::vector<float> values(4);
    launching = true;
    expect_in(message_of<FaultError>([&] { communicator->run(sum_of(values)); }), {"aborted"});
  });
  while (!launching) std::this_thread::yield();
  communicator->abort();
  thread.join();
}

TEST(NcclFault, ALaunchThatTakesTooLongIsAFault) {
  NcclRig rig(1, 2, {.launch_hangs = true});
  const auto communicator = rig.make(0, {.launch_timeout_s = 0.02});
  std::vector<float> values(4);
  const std::vector<std::string> parts = {"rank 0: NCCL communicator 0 of 2", "no progress"};
  expect_in(message_of<FaultError>([&] { communicator->run(sum_of(values)); }), parts);
  expect_in(communicator->failure(), parts);
  expect_in(message_of<FaultError>([&] { communicator->run(sum_of(values)); }), parts);
}

TEST(NcclFault, AnErrorThatComesLaterIsFound) {
  NcclRig rig(2, 2, {.fails_on = 1, .fails_at = 2});
  on_each_rank(2, [&](int rank) {
    const auto communicator = rig.make(rank);
    Cuda& cuda = rig.device(rank);
    std::vector<std::vector<float>> values(3, std::vector<float>(4));
    std::vector<std::unique_ptr<OrderEvents>> events;
    for (auto& v : values) {
      events.push_back(std::make_unique<OrderEvents>(cuda, std::vector<CudaEvent>{}));
      Request request = sum_of(v);
      request.order = events.back()->order();
      request.fence = true;
      try {
        Pending(*communicator, request).get();
      } catch (const FaultError&) {
        // The device may be faster than the end of the launch, which then tells the error.
        EXPECT_EQ(rank, 1);
        EXPECT_EQ(&v, &values.back());
      }
    }
    rig.nccl().await_on_device(6);
    if (rank == 1) {
      expect_in(communicator->failure(),
                {"rank 1: NCCL communicator 0 of 2 failed: fake error 6 (last words)"});
    } else {
      EXPECT_EQ(communicator->failure(), "");
    }
    communicator->abort();
    cuda.synchronize(events.back()->order().done);
  });
}

TEST(NcclFault, ARunThatFailsOnTheDeviceEnds) {
  NcclRig rig(2, 1, {.fails_on = 0, .fails_at = 1});
  on_each_rank(2, [&](int rank) {
    const auto communicator = rig.make(rank);
    std::vector<float> values(4, 1);
    communicator->run(sum_of(values));
    EXPECT_EQ(values, std::vector<float>(4, 2));
    Pending pending(*communicator, sum_of(values));
    // The failed rank finds out by itself; nobody tells the other one but its engine.
    if (rank == 1) communicator->abort();
    const std::string error = message_of<FaultError>([&] { pending.get(); });
    if (rank == 0) expect_in(error, {"rank 0", "fake error 6"});
  });
}

TEST(NcclFault, AnEndThatOthersDoNotShareIsBounded) {
  NcclRig rig(2, 2, {.finalize_hangs = true});
  on_each_rank(2, [&](int rank) { rig.make(rank, {.close_timeout_s = 0.02}); });
  EXPECT_EQ(rig.nccl().aborted(), 4);
}

TEST(NcclFault, TheEndDoesNotWaitForGoodForWhatHangs) {
  NcclRig rig(2, 2, {.hangs_from = 0});
  on_each_rank(2, [&](int rank) {
    std::vector<float> values(4);
    OrderEvents events(rig.device(rank), {});
    Request request = sum_of(values);
    request.order = events.order();
    auto communicator = rig.make(rank, {.close_timeout_s = 0.02});
    Pending(*communicator, request).get();
    Pending unordered(*communicator, sum_of(values));
    communicator.reset();
    expect_in(message_of<FaultError>([&] { unordered.get(); }), {"rank"});
    rig.device(rank).synchronize(events.order().done);
  });
}

TEST(NcclFault, ACallThatNcclRefusesNamesItAndLeavesTheThreadUsable) {
  NcclRig rig(1, 1, {.refused_count = 7});
  const auto communicator = rig.make(0);
  std::vector<float> refused(7), fine(4, 1);
  expect_in(message_of<FaultError>([&] { communicator->run(sum_of(refused)); }),
            {"rank 0: ncclAllReduce: fake error 4 (last words)"});
  communicator->run(sum_of(fine));
  EXPECT_EQ(rig.nccl().kinds().size(), 1U);
}

TEST(NcclFault, ACudaErrorReachesTheCompletion) {
  NcclRig rig(1, 1);
  const auto communicator = rig.make(0);
  std::vector<float> values(4);
  rig.cuda().poison("an illegal address");
  expect_in(message_of<FaultError>([&] { communicator->run(sum_of(values)); }),
            {"an illegal address"});
}

TEST(NcclFault, NcclIsEnteredByOneThreadAtATime) {
  NcclRig rig(2, 2, {.polls = 2, .call_s = 2e-5});
  rig.on_each([&](int, NcclCommunicator& communicator) {
    std::atomic<bool> stop = false;
    std::thread watcher([&] {
      while (!stop) EXPECT_EQ(communicator.failure(), "");
    });
    std::vector<float> values(4, 1);
    for (int i = 0; i < 50; ++i) communicator.run(sum_of(values));
    stop = true;
    watcher.join();
  });
}

TEST(NcclFault, ArgumentsAreChecked) {
  NcclRig rig(2, 1);
  expect_in(message_of<UsageError>([&] { rig.make(1, {.limits = {-1, 0}}); }), {"negative"});
  const auto nccl = std::make_shared<test::FakeNccl>(std::vector<test::TracedCuda*>{},
                                                     FakeNcclOptions{.version = 21605});
  const std::shared_ptr<Cuda> cuda = make_emulated_cuda();
  const auto make = [&](int rank, const std::vector<NcclId>& ids, const NcclOptions& options) {
    return message_of<UsageError>([&] { NcclCommunicator(nccl, cuda, rank, 2, ids, options); });
  };
  expect_in(make(2, {{}}, {}), {"rank 2 of 2"});
  expect_in(make(0, {}, {}), {"one id"});
  expect_in(make(0, {{}}, {.limits = {0, 8}}), {"NCCL 2.16.5 knows no", "2.17.0"});
}

TEST(NcclBuffers, LimitsReachEveryCommunicator) {
  NcclRig rig(1, 2);
  rig.make(0, {.limits = {2, 8}});
  for (const NcclConfig& config : rig.nccl().configs()) {
    EXPECT_EQ(config.min_ctas, 2);
    EXPECT_EQ(config.max_ctas, 8);
  }
}

// What a version can do with an own buffer and with one of CUDA's.
void register_buffers(NcclRig& rig, const NcclOptions& options = {}) {
  rig.on_each(
      [&](int rank, NcclCommunicator& communicator) {
        void* const own = communicator.allocate(1024);
        void* const other = rig.device(rank).allocate(1024);
        communicator.register_buffer(own, 1024);
        communicator.register_buffer(other, 1024);
        communicator.deregister_buffer(other);
        std::vector<float> values(4, 1);
        communicator.run(sum_of(values));
        communicator.deregister_buffer(own);
        communicator.register_buffer(own, 1024);
        rig.device(rank).free(other);
        communicator.free(own);  // its registration ends with the communicator
      },
      options);
}

TEST(NcclBuffers, WindowsWhereTheVersionHasThem) {
  NcclRig rig(2, 2, {.version = 22703, .polls = 2});
  register_buffers(rig);
  EXPECT_EQ(rig.nccl().windows_made(), 8);
  EXPECT_EQ(rig.nccl().buffers_registered(), 4);
}

TEST(NcclBuffers, RegisteredWhereTheMachineHasNoUseForWindows) {
  NcclRig rig(2, 2, {.version = 22703, .windows = false});
  register_buffers(rig);
  EXPECT_EQ(rig.nccl().buffers_registered(), 12);
}

TEST(NcclBuffers, RegisteredWhereWindowsAreNotWanted) {
  NcclRig rig(2, 1);
  register_buffers(rig, {.windows = false});
  EXPECT_EQ(rig.nccl().windows_made(), 0);
  EXPECT_EQ(rig.nccl().buffers_registered(), 6);
}

TEST(NcclBuffers, RegisteredBeforeThereWereWindows) {
  NcclRig rig(2, 2, {.version = 21903});
  register_buffers(rig);
  EXPECT_EQ(rig.nccl().buffers_registered(), 12);
}

TEST(NcclBuffers, PlainMemoryBeforeThat) {
  NcclRig rig(2, 2, {.version = 21605});
  register_buffers(rig);
  EXPECT_EQ(rig.nccl().buffers_registered(), 0);
}

TEST(NcclBuffers, StayRegisteredUntilWhatIsInFlightIsOver) {
  for (const bool windows : {false, true}) {
    NcclRig rig(2, 1);
    on_each_rank(2, [&](int rank) {
      auto communicator = rig.make(rank, {.windows = windows});
      EmulatedCuda& cuda = rig.cuda();
      void* const memory = communicator->allocate(1024);
      communicator->register_buffer(memory, 1024);
      const CudaStream late = cuda.create_stream(false);
      const CudaEvent ready = cuda.create_event(EventKind::ordering);
      cuda.delay(late, 0.02);
      cuda.record(ready, late);
      const OrderEvents events(cuda, {ready});
      std::vector<float> values(4, 1);
      Request request = sum_of(values);
      request.order = events.order();
      Pending(*communicator, request).get();
      communicator->close();
      EXPECT_EQ(values, std::vector<float>(4, 2));
      communicator->free(memory);
      cuda.destroy(ready);
      cuda.destroy(late);
    });
  }
}

TEST(NcclBuffers, AreGivenBackAfterAnAbort) {
  NcclRig rig(2, 1);
  rig.on_each([&](int, NcclCommunicator& communicator) {
    void* const memory = communicator.allocate(1024);
    communicator.register_buffer(memory, 1024);
    communicator.abort();
    communicator.deregister_buffer(memory);
    communicator.free(memory);
  });
}

}  // namespace
}  // namespace usbyte
