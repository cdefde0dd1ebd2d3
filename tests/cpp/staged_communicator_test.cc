// SPDX-License-Identifier: Apache-2.0
#include "cuda/communicators/staged_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <latch>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/local_communicator.h"
#include "communicators.h"
#include "cuda/communicators/staging.h"
#include "cuda/emulation/emulated_cuda.h"
#include "ranks.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::ManualCommunicator;
using test::message_of;
using test::on_each_rank;
using test::Pending;
using test::Random;
using Bytes = std::vector<std::byte>;

// One request, its memory and where it lies in that.
struct Case {
  struct Place {
    int64_t offset, count;  // bytes, elements
  };

  Request request;  // spans yet to be placed
  std::vector<Place> send, recv;
  Bytes in;

  Request at(std::byte* memory) const {
    Request out = request;
    for (const Place& p : send) out.send.push_back({memory + p.offset, p.count});
    for (const Place& p : recv) out.recv.push_back({memory + p.offset, p.count});
    return out;
  }
};

// All ranks draw the same shapes; `data` differs.
Case random_case(Random& shapes, Random& data, int size) {
  constexpr DType kReducible[] = {DType::float32, DType::float64, DType::int32, DType::int64};
  Case c;
  c.request.kind = static_cast<Collective>(shapes(0, 5));
  c.request.reduce = static_cast<ReduceOp>(shapes(0, 2));
  c.request.root = static_cast<int>(shapes(0, size - 1));
  c.request.dtype = c.request.kind <= Collective::reduce_scatter ? kReducible[shapes(0, 3)]
                                                                 : static_cast<DType>(shapes(0, 7));
  const int64_t width = itemsize(c.request.dtype);
  int64_t end = 0;
  const auto place = [&](int64_t count) {
    const int64_t offset = end + width * shapes(0, 2);
    end = offset + count * width;
    return Case::Place{offset, count};
  };
  if (c.request.kind == Collective::all_to_all) {
    const int64_t count = shapes(0, 60) * size;
    c.recv = {place(count)};
    c.send = {shapes.one_in(2) ? c.recv[0] : place(count)};
  } else if (c.request.kind != Collective::barrier) {
    for (int64_t s = shapes(1, 5); s > 0; --s) {
      c.recv.push_back(place(shapes.one_in(3) ? shapes(0, 900) : shapes(0, 3 * size)));
    }
  }
  // Small integers, whose sums are exact in any order; their bytes will do for the other types.
  c.in.resize(static_cast<size_t>(end + 2 * width));
  for (size_t i = 0; i + static_cast<size_t>(width) <= c.in.size();
       i += static_cast<size_t>(width)) {
    const int64_t value = data(-1000, 1000);
    const auto real = static_cast<double>(value);
    const auto single = static_cast<float>(value);
    const void* source = c.request.dtype == DType::float64   ? static_cast<const void*>(&real)
                         : c.request.dtype == DType::float32 ? static_cast<const void*>(&single)
                                                             : static_cast<const void*>(&value);
    std::memcpy(&c.in[i], source, static_cast<size_t>(width));
  }
  return c;
}

// What the memory must hold in the end: what a communicator of the host makes of it, but unchanged
// where that is undefined.
Bytes expected(const Case& c, Communicator& reference) {
  Bytes out = c.in;
  reference.run(c.at(out.data()));
  if (c.request.kind != Collective::reduce_scatter) return out;
  const int64_t width = itemsize(c.request.dtype);
  Bytes only_shards = c.in;
  for (const Case::Place& p : c.recv) {
    const Block mine = shard({0, p.count}, reference.rank(), reference.size());
    std::copy(out.begin() + p.offset + mine.begin * width,
              out.begin() + p.offset + mine.end * width,
              only_shards.begin() + p.offset + mine.begin * width);
  }
  return only_shards;
}

// A rank's device: memory that a compute stream writes late, and events of each request.
class Device {
 public:
  explicit Device(std::shared_ptr<EmulatedCuda> emulated)
      : cuda(std::move(emulated)), compute(cuda->create_stream(false)) {}

  struct Launch {
    std::byte* memory;
    CudaEvent ready, started, done;
    Bytes out;  // once `compute` is over
  };

  std::shared_ptr<Launch> prepare(const Bytes& in) {
    auto launch = std::make_shared<Launch>();
    launch->memory = static_cast<std::byte*>(cuda->allocate(in.size()));
    for (CudaEvent* e : {&launch->ready, &launch->started, &launch->done}) {
      *e = cuda->create_event(EventKind::timed);
    }
    cuda->enqueue(compute, [memory = launch->memory, in] { std::ranges::copy(in, memory); });
    cuda->record(launch->ready, compute);
    return launch;
  }
  Request ordered(Request request, const Launch& launch) const {
    request.order = StreamOrder{{launch.ready}, launch.started, launch.done};
    return request;
  }
  // As a layer would, on the device.
  void read_back(const std::shared_ptr<Launch>& launch, size_t bytes) {
    cuda->wait(compute, launch->done);
    cuda->enqueue(compute,
                  [launch, bytes] { launch->out.assign(launch->memory, launch->memory + bytes); });
  }
  void give_back(const Launch& launch) {
    cuda->free(launch.memory);
    for (CudaEvent e : {launch.ready, launch.started, launch.done}) cuda->destroy(e);
  }

  const std::shared_ptr<EmulatedCuda> cuda;
  const CudaStream compute;
};

void run_cases(int size, AlphaBeta cost, uint64_t seed) {
  auto inner = make_local_communicators(size, cost);
  auto references = make_local_communicators(size);
  on_each_rank(size, [&](int rank) {
    Random shapes(seed), data(seed * 100 + static_cast<uint64_t>(rank));
    const StagedOptions options{shapes.one_in(3) ? 4096 : shapes(8 * size, 400),
                                static_cast<int>(shapes(2, 4))};
    Communicator& reference = *references[static_cast<size_t>(rank)];
    Device device(make_emulated_cuda(
        {.most_delay_s = seed % 2 == 0 ? 0 : 1e-4, .seed = seed + static_cast<uint64_t>(rank)}));
    auto staged = std::make_unique<StagedCommunicator>(
        device.cuda, std::move(inner[static_cast<size_t>(rank)]), options);
    std::vector<Case> cases;
    for (int i = 0; i < 12; ++i) cases.push_back(random_case(shapes, data, size));
    std::vector<std::shared_ptr<Device::Launch>> launches;
    std::vector<Pending> pending;
    for (const Case& c : cases) {
      launches.push_back(device.prepare(c.in));
      pending.emplace_back(*staged,
                           device.ordered(c.at(launches.back()->memory), *launches.back()));
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      pending[i].get();
      device.read_back(launches[i], cases[i].in.size());
    }
    device.cuda->synchronize(device.compute);
    for (size_t i = 0; i < cases.size(); ++i) {
      EXPECT_EQ(launches[i]->out, expected(cases[i], reference))
          << name(cases[i].request.kind) << " " << name(cases[i].request.dtype) << " rank " << rank
          << " of " << size << " request " << i << " seed " << seed;
      EXPECT_GE(device.cuda->elapsed_s(launches[i]->ready, launches[i]->started), 0);
      EXPECT_GE(device.cuda->elapsed_s(launches[i]->started, launches[i]->done), 0);
      device.give_back(*launches[i]);
    }
    staged.reset();
    EXPECT_EQ(device.cuda->live(), 1) << "the compute stream alone";
  });
}

TEST(StagedCommunicatorTest, DoesWhatAHostCommunicatorDoes) {
  for (int size = 1; size <= 4; ++size) {
    for (uint64_t seed = 1; seed <= 20; ++seed) run_cases(size, {}, seed);
  }
}

TEST(StagedCommunicatorTest, DoesSoOnASlowNetwork) {
  for (int size = 2; size <= 4; ++size) {
    for (uint64_t seed = 101; seed <= 103; ++seed) run_cases(size, {5e-5, 1e-8, 2e-5}, seed);
  }
}

TEST(StagedCommunicatorTest, WithoutAnOrderMemoryHoldsTheResultOnCompletion) {
  constexpr int kSize = 3;
  auto inner = make_local_communicators(kSize);
  on_each_rank(kSize, [&](int rank) {
    const auto cuda = make_emulated_cuda({.most_delay_s = 1e-3, .seed = 7});
    StagedCommunicator staged(cuda, std::move(inner[static_cast<size_t>(rank)]), {64, 2});
    auto* memory = static_cast<int32_t*>(cuda->allocate(400));
    for (int i = 0; i < 100; ++i) memory[i] = i + rank;
    Request request{Collective::all_reduce, DType::int32, ReduceOp::sum, 0, {}, {{memory, 100}}};
    staged.run(request);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(memory[i], 3 * i + 3);
    cuda->free(memory);
  });
}

// A request of 25 chunks over a network that the test moves.
class StagedFaultTest : public testing::Test {
 protected:
  static constexpr int64_t kCount = 100;  // int32 elements, 16 bytes a chunk

  std::shared_ptr<EmulatedCuda> cuda = make_emulated_cuda({.most_delay_s = 1e-5, .seed = 1});
  std::shared_ptr<ManualCommunicator> network = std::make_shared<ManualCommunicator>();
  std::unique_ptr<StagedCommunicator> staged =
      std::make_unique<StagedCommunicator>(cuda, network, StagedOptions{16, 3});
  Device device{cuda};
  std::shared_ptr<Device::Launch> memory = device.prepare(Bytes(kCount * 4, std::byte{1}));

  Request request() const {
    Request r;
    r.kind = Collective::all_reduce;
    r.dtype = DType::int32;
    r.recv = {{memory->memory, kCount}};
    return device.ordered(r, *memory);
  }
};

TEST_F(StagedFaultTest, KeepsEveryBufferOnTheNetworkAndNoMore) {
  Pending pending(*staged, request());
  for (int completed = 0; completed < 25; ++completed) {
    ASSERT_TRUE(network->await_launches(std::min(completed + 3, 25)));
    EXPECT_LE(network->launched(), completed + 3);
    // Not in the order of launches.
    network->complete(completed % 3 == 0 ? std::min(completed + 1, 24)
                                         : completed - (completed % 3 == 1 ? 1 : 0));
  }
  pending.get();
}

TEST_F(StagedFaultTest, NothingIsSentBeforeItsEvents) {
  const CudaStream held = cuda->create_stream(false);
  const CudaEvent late = cuda->create_event(EventKind::timed);
  const auto gate = std::make_shared<std::latch>(1);
  cuda->enqueue(held, [gate] { gate->wait(); });
  cuda->record(late, held);
  Request both = request();
  both.order->after.push_back(late);
  Pending pending(*staged, both);
  cuda->synchronize(memory->ready);
  EXPECT_EQ(network->launched(), 0);
  gate->count_down();
  for (int chunk = 0; chunk < 25; ++chunk) {
    ASSERT_TRUE(network->await_launches(chunk + 1));
    network->complete(chunk);
  }
  pending.get();
  EXPECT_GE(cuda->elapsed_s(late, memory->started), 0);
}

TEST_F(StagedFaultTest, AnErrorOfTheNetworkEndsEverything) {
  Pending first(*staged, request()), second(*staged, request());
  ASSERT_TRUE(network->await_launches(3));
  network->complete(1, std::make_exception_ptr(MismatchError("rank 1 differs")));
  EXPECT_EQ(message_of<MismatchError>([&] { first.get(); }), "rank 1 differs");
  const std::string dropped = "an earlier staged request has failed: rank 1 differs";
  EXPECT_EQ(message_of<FaultError>([&] { second.get(); }), dropped);
  EXPECT_EQ(message_of<FaultError>([&] { Pending(*staged, request()).get(); }), dropped);
  network->complete(0);
  network->complete(2, std::make_exception_ptr(FaultError("late")));
  staged.reset();
  EXPECT_EQ(network->launched(), 3);
}

TEST_F(StagedFaultTest, AnErrorOfTheDeviceEndsEverything) {
  Pending pending(*staged, request());
  ASSERT_TRUE(network->await_launches(3));
  cuda->poison("device lost");
  network->complete(0);
  EXPECT_EQ(message_of<FaultError>([&] { pending.get(); }), "device lost");
  staged.reset();
  network->complete(1);
}

TEST_F(StagedFaultTest, DestructionInFlightCompletesWithAnErrorAndTouchesNothingLater) {
  Pending first(*staged, request()), second(*staged, request());
  ASSERT_TRUE(network->await_launches(3));
  network->complete(0);
  staged.reset();
  for (Pending* pending : {&first, &second}) {
    EXPECT_NE(message_of<FaultError>([&] { pending->get(); }).find("destroyed before"),
              std::string::npos);
  }
  const int launched = network->launched();
  device.give_back(*memory);
  for (int chunk = 1; chunk < launched; ++chunk) network->complete(chunk);
  EXPECT_EQ(network->launched(), launched);
  EXPECT_EQ(cuda->live(), 1) << "buffers, events and streams are given back";
}

TEST_F(StagedFaultTest, AnAbortDoesNotWaitForGoodForADeviceThatHangs) {
  const CudaStream held = cuda->create_stream(false);
  const CudaEvent late = cuda->create_event(EventKind::ordering);
  const auto gate = std::make_shared<std::latch>(1);
  cuda->enqueue(held, [gate] { gate->wait(); });
  cuda->record(late, held);
  Request behind = request();
  behind.order->after.push_back(late);
  Pending pending(*staged, behind);
  staged->abort();
  EXPECT_NE(message_of<FaultError>([&] { pending.get(); }).find("aborted"), std::string::npos);
  gate->count_down();
  cuda->synchronize(held);
  staged.reset();
  EXPECT_EQ(network->launched(), 0);
}

TEST_F(StagedFaultTest, ACompletionMayDestroyTheCommunicator) {
  bool failed = true;
  staged->launch(request(), [&](std::exception_ptr error) {
    failed = error != nullptr;
    staged.reset();
  });
  for (int chunk = 0; chunk < 25; ++chunk) {
    ASSERT_TRUE(network->await_launches(chunk + 1));
    network->complete(chunk);
  }
  EXPECT_FALSE(failed);
  EXPECT_FALSE(staged);
}

TEST_F(StagedFaultTest, EvenOnItsOwnThread) {
  auto alone = std::move(make_local_communicators(1)[0]);  // completes in launch
  staged = std::make_unique<StagedCommunicator>(cuda, std::move(alone), StagedOptions{16, 2});
  const auto over = std::make_shared<std::latch>(1);
  staged->launch(request(), [&](std::exception_ptr error) {
    EXPECT_FALSE(error);
    staged.reset();
    over->count_down();
  });
  over->wait();
}

TEST_F(StagedFaultTest, BadRequestsAndOptionsAreRefused) {
  Request bad = request();
  bad.kind = Collective::broadcast;
  bad.root = 1;
  EXPECT_NE(message_of<UsageError>([&] { staged->run(bad); }).find("root 1"), std::string::npos);
  bad = request();
  bad.recv[0].data = nullptr;
  EXPECT_NE(message_of<UsageError>([&] { staged->run(bad); }).find("no memory"), std::string::npos);
  bad = request();
  bad.kind = Collective::all_to_all;
  EXPECT_NE(message_of<UsageError>([&] { staged->run(bad); }).find("one send"), std::string::npos);
  bad = request();
  bad.scale = 0.5;
  EXPECT_NE(message_of<UsageError>([&] { staged->run(bad); }).find("scale"), std::string::npos);
  bad = request();
  bad.dimension = 0;
  EXPECT_NE(message_of<UsageError>([&] { staged->run(bad); }).find("no dimension 0"),
            std::string::npos);
  const auto make = [&](StagedOptions options) {
    return [this, options] { StagedCommunicator(cuda, network, options); };
  };
  EXPECT_NE(message_of<UsageError>(make({7, 2})).find("chunk_bytes 7"), std::string::npos);
  EXPECT_NE(message_of<UsageError>(make({8, 1})).find("buffers 1"), std::string::npos);
}

Request floats(Collective kind, std::vector<int64_t> counts, std::vector<float>& memory) {
  Request request;
  request.kind = kind;
  float* at = memory.data();
  for (int64_t count : counts) {
    request.recv.push_back({at, count});
    at += count + 1;
  }
  return request;
}

TEST(StagingTest, SmallSpansShareAMessage) {
  std::vector<float> memory(200);
  const auto chunks = stage(floats(Collective::all_reduce, {3, 5, 100}, memory), 0, 2, 64);
  ASSERT_EQ(chunks.size(), 7U);
  EXPECT_EQ(chunks[0].count, 16);
  EXPECT_EQ(chunks[0].out.size(), 3U);
  EXPECT_EQ(chunks[6].count, 12);
  EXPECT_EQ(chunks[6].in.size(), 1U);
}

TEST(StagingTest, OnlyWhatARankHasOrNeedsIsCopied) {
  std::vector<float> memory(200);
  const auto bytes = [](const std::vector<StagedCopy>& copies) {
    int64_t sum = 0;
    for (const StagedCopy& c : copies) sum += c.bytes;
    return sum;
  };
  for (const auto& [kind, root, out, in] : {std::tuple{Collective::all_reduce, 0, 400, 400},
                                            {Collective::reduce_scatter, 0, 400, 100},
                                            {Collective::all_gather, 0, 100, 300},
                                            {Collective::broadcast, 1, 400, 0},
                                            {Collective::broadcast, 2, 0, 400}}) {
    Request request = floats(kind, {100}, memory);
    request.root = root;
    const auto chunks = stage(request, 1, 4, 400);
    ASSERT_EQ(chunks.size(), 1U);
    EXPECT_EQ(bytes(chunks[0].out), out) << name(kind);
    EXPECT_EQ(bytes(chunks[0].in), in) << name(kind);
    EXPECT_LE(chunks[0].out.size(), 1U) << "shards that lie side by side are one copy";
  }
}

TEST(StagingTest, MessagesAreTheSameOnEveryRank) {
  std::vector<float> memory(2000);
  for (Collective kind : {Collective::reduce_scatter, Collective::all_gather}) {
    const Request request = floats(kind, {101, 0, 1, 7, 1000}, memory);
    const auto chunks = stage(request, 0, 4, 256);
    for (int rank = 1; rank < 4; ++rank) {
      const auto others = stage(request, rank, 4, 256);
      ASSERT_EQ(chunks.size(), others.size());
      for (size_t c = 0; c < chunks.size(); ++c) EXPECT_EQ(chunks[c].count, others[c].count);
    }
  }
}

}  // namespace
}  // namespace usbyte
