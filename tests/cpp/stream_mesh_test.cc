// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_training.h"
#include "simulator/mesh_simulator.h"
#include "stream_mesh_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using namespace test;

/// An all_reduce on its way on one rank: kernels write its inputs, late, and take its results away.
template <typename T>
class Reducing {
 public:
  Reducing(StreamMeshRig& rig, int rank, CudaStream compute, const std::vector<int64_t>& counts,
           const Schedule& schedule, int64_t window_bytes, bool fence)
      : cuda_(rig.rig().device(rank)),
        emulated_(rig.rig().cuda()),
        size_(rig.topology().ranks()),
        ready_(cuda_.create_event(EventKind::ordering)),
        events_(cuda_, {ready_}) {
    for (int64_t count : counts) data_.emplace_back(static_cast<size_t>(count));
    emulated_.enqueue(compute, [this, rank] {
      for (size_t s = 0; s < data_.size(); ++s) {
        for (size_t i = 0; i < data_[s].size(); ++i) data_[s][i] = number(rank, s, i);
      }
    });
    cuda_.record(ready_, compute);
    request_ = sum_of(data_, schedule);
    request_.window_bytes = window_bytes;
    request_.fence = fence;
    request_.order = events_.order();
  }
  ~Reducing() { cuda_.destroy(ready_); }
  Reducing(const Reducing&) = delete;
  Reducing& operator=(const Reducing&) = delete;

  const Request& request() const { return request_; }
  void read(CudaStream compute) {
    cuda_.wait(compute, events_.order().done);
    emulated_.enqueue(compute, [this] { result_ = data_; });
  }
  void check() const {
    EXPECT_TRUE(cuda_.passed(events_.order().started));
    EXPECT_GE(cuda_.elapsed_s(events_.order().started, events_.order().done), 0);
    ASSERT_EQ(result_.size(), data_.size());
    for (size_t s = 0; s < result_.size(); ++s) {
      for (size_t i = 0; i < result_[s].size(); ++i) {
        T sum{};
        for (int r = 0; r < size_; ++r) sum += number(r, s, i);
        ASSERT_EQ(result_[s][i], sum) << "span " << s << ", element " << i;
      }
    }
  }

 private:
  // Whole and small: sums are exact in any order.
  static T number(int rank, size_t span, size_t i) {
    return static_cast<T>((i * 31 + static_cast<size_t>(rank) * 17 + span * 7) % 1009);
  }

  TracedCuda& cuda_;
  EmulatedCuda& emulated_;
  const int size_;
  const CudaEvent ready_;
  const OrderEvents events_;
  std::vector<std::vector<T>> data_, result_;
  Request request_;
};

struct Asked {
  std::vector<int64_t> counts;
  Schedule schedule = nullptr;
  int64_t window_bytes = 0;
  bool fence = false;
};

/// Launches all without waiting for any, and checks the sums at the end.
template <typename T>
void run_all(StreamMeshRig& rig, const std::vector<Asked>& all, int slots) {
  rig.on_each(
      [&](int rank, StreamMeshCommunicator& mesh) {
        Cuda& cuda = rig.rig().device(rank);
        const CudaStream compute = cuda.create_stream(false);
        std::vector<std::unique_ptr<Reducing<T>>> running;
        const auto read = [&](size_t behind) {
          if (running.size() > behind) running[running.size() - 1 - behind]->read(compute);
        };
        for (const Asked& asked : all) {
          running.push_back(std::make_unique<Reducing<T>>(
              rig, rank, compute, asked.counts, asked.schedule, asked.window_bytes, asked.fence));
          Pending(mesh, running.back()->request()).get();
          read(3);
        }
        for (size_t behind : {2, 1, 0}) read(behind);
        cuda.synchronize(compute);
        for (const auto& r : running) r->check();
        EXPECT_EQ(mesh.failure(), "");
        cuda.destroy(compute);
      },
      slots);
}

TEST(StreamMesh, EveryOrderOfEveryChunkIsTheSum) {
  const std::vector<std::vector<int>> meshes = {{1},    {3},       {2, 2},   {3, 2},
                                                {1, 3}, {2, 1, 2}, {2, 2, 2}};
  for (const std::vector<int>& sizes : meshes) {
    const Topology topology = mesh(sizes);
    SCOPED_TRACE(topology.to_json());
    std::vector<Asked> all;
    for (const Route& first : orders(topology)) {
      for (const Route& second : orders(topology)) {
        all.push_back({{100}, schedule(topology, {first, second})});
      }
    }
    all.push_back({{7, 0, 1, 64}, schedule(topology, orders(topology))});
    all.push_back({{5}});
    all.push_back({{0}, schedule(topology, orders(topology), MeshQueue::smallest_chunk_first)});
    StreamMeshRig floats(topology, 2, {}, {.most_delay_s = 1e-4});
    run_all<float>(floats, all, 2);
    StreamMeshRig integers(topology, 2, {}, {.most_delay_s = 1e-4});
    run_all<int64_t>(integers, all, 3);
  }
}

TEST(StreamMesh, RandomMeshesSchedulesAndWindows) {
  for (uint64_t seed = 1; seed <= 12 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    std::vector<int> sizes(static_cast<size_t>(random(1, 3)));
    for (int& size : sizes) size = static_cast<int>(random(1, sizes.size() > 2 ? 2 : 3));
    const Topology topology = mesh(sizes);
    std::vector<Asked> all;
    for (int i = 0; i < 12; ++i) {
      Asked& asked = all.emplace_back();
      for (int64_t span = random(0, 3); span > 0; --span) asked.counts.push_back(random(0, 90));
      if (!random.one_in(4)) asked.schedule = random_schedule(topology, random);
      asked.window_bytes = random.one_in(3) ? 0 : random(1, 900);
      asked.fence = random.one_in(5);
    }
    FakeNcclOptions fake;
    fake.polls = static_cast<int>(random(0, 2));
    StreamMeshRig rig(topology, static_cast<int>(random(1, 3)), fake,
                      {.most_delay_s = 3e-4, .seed = seed});
    run_all<int32_t>(rig, all, static_cast<int>(random(1, 3)));
  }
}

// What the calls order, whatever the timing; all phases have something to do on every rank here.
TEST(StreamMesh, PhasesAndRequestsAreInOrderOnTheDevice) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Topology topology = mesh({2, 3});
    const int slots = static_cast<int>(random(1, 3));
    std::vector<Asked> all;
    for (int i = 0; i < 10; ++i) {
      const auto window_bytes = random.one_in(3) ? 0 : random(400, 4000);
      all.push_back({{random(90, 200)},
                     random.one_in(3) ? nullptr : random_schedule(topology, random),
                     window_bytes,
                     random.one_in(4)});
    }
    StreamMeshRig rig(topology, 2, {}, {.most_delay_s = 2e-4, .seed = seed});
    run_all<int32_t>(rig, all, slots);
    struct Launch {
      size_t request;
      int chunk, phase;
    };
    std::vector<Launch> launches;
    for (size_t i = 0; i < all.size(); ++i) {
      if (!all[i].schedule) {
        launches.push_back({i, -1, -1});
        continue;
      }
      const auto bytes = 4.0 * static_cast<double>(all[i].counts[0]);
      for (const LinePhase& phase : launch_order(topology, *all[i].schedule, bytes)) {
        launches.push_back({i, phase.at.chunk, phase.at.phase});
      }
    }
    for (int rank = 0; rank < topology.ranks(); ++rank) {
      const std::vector<Begin> begins = rig.rig().device(rank).begins();
      ASSERT_EQ(begins.size(), launches.size());
      for (const Begin& begin : begins) {
        const Launch& mine = launches[static_cast<size_t>(begin.op)];
        const Asked& asked = all[mine.request];
        std::set<size_t> beside;
        for (int before = 0; before < begin.op; ++before) {
          const Launch& its = launches[static_cast<size_t>(before)];
          EXPECT_TRUE(begin.started.contains(before));
          if (begin.over.contains(before)) continue;
          if (its.request != mine.request) beside.insert(its.request);
          EXPECT_FALSE(its.request == mine.request && its.chunk == mine.chunk)
              << "phase " << mine.phase << " of chunk " << mine.chunk << " beside " << its.phase;
        }
        int64_t bytes = 4 * asked.counts[0];
        for (size_t other : beside) bytes += 4 * all[other].counts[0];
        EXPECT_LT(std::ssize(beside), slots);
        if (beside.empty()) continue;
        EXPECT_FALSE(asked.fence);
        if (asked.window_bytes > 0) {
          EXPECT_LE(bytes, asked.window_bytes);
        }
      }
    }
  }
}

TEST(StreamMesh, ChunksOnDifferentLinesRunSideBySide) {
  StreamMeshRig rig(mesh({2, 2}), 1);
  run_all<float>(rig, {{{64}, schedule(mesh({2, 2}), {{0, 1}, {1, 0}})}}, 1);
  for (const Begin& begin : rig.rig().device(0).begins()) {
    // In pairs, one on each axis group.
    if (begin.op % 2 == 1) {
      EXPECT_FALSE(begin.over.contains(begin.op - 1)) << begin.op;
    }
  }
}

TEST(StreamMesh, RequestsAlongALineAreAmongItsRanks) {
  const Topology topology = mesh({2, 3, 1});
  StreamMeshRig rig(topology, 1);
  rig.on_each(
      [&](int rank, StreamMeshCommunicator& mesh) {
        TracedCuda& cuda = rig.rig().device(rank);
        for (int dimension : {0, 1, 2, 1}) {
          int32_t sum = 0;
          for (int other : topology.axis_group(rank, dimension)) sum += other;
          std::vector<int32_t> data(5, rank);
          for (auto kind : {Collective::reduce_scatter, Collective::all_gather}) {
            const OrderEvents events(cuda, {});
            Request request;
            request.kind = kind;
            request.dtype = DType::int32;
            request.dimension = dimension;
            request.recv = {{data.data(), 5}};
            request.order = events.order();
            Pending(mesh, request).get();
            cuda.synchronize(events.order().done);
          }
          EXPECT_EQ(data, std::vector<int32_t>(5, sum)) << "dimension " << dimension;
        }
      },
      2);
}

TEST(StreamMesh, TrainsOnRoutesByDevicesThatAreLate) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Topology topology = mesh({2, 2});
    std::vector<TensorSpec> tensors;
    int64_t offset = 0;
    for (int i = 0; i < 6; ++i) {
      const int64_t numel = random(1, 60);
      tensors.push_back({"t" + std::to_string(i), numel, DType::float32, offset});
      offset += numel;
    }
    std::vector<Op> ops;
    for (int64_t begin = 0; begin < offset;) {
      const int64_t end = std::min(begin + random(1, 90), offset);
      Op& op = ops.emplace_back();
      op.kind = Collective::all_reduce;
      op.blocks = {{begin, end}};
      op.window_bytes = random(1, 800);
      if (!random.one_in(3)) op.route = *random_schedule(topology, random);
      begin = end;
    }
    const Plan plan("routes", tensors, ops);
    StreamMeshRig rig(topology, 2, {}, {.most_delay_s = 3e-4, .seed = seed});
    rig.on_each(
        [&](int rank, StreamMeshCommunicator& mesh) {
          train_on_device(plan, mesh, rig.rig().shared_device(rank), rig.rig().cuda(), seed, 6, 2);
        },
        2);
  }
}

TEST(StreamMesh, TheHostWaitsForNothing) {
  const Topology topology = mesh({2, 2});
  StreamMeshRig rig(topology, 2);
  const Schedule routed = schedule(topology, {{0, 1}, {1, 0}, {0, 1}});
  std::promise<void> gate;
  const std::shared_future<void> opened = gate.get_future().share();
  std::atomic<int> launched = 0;
  rig.on_each(
      [&](int rank, StreamMeshCommunicator& mesh) {
        TracedCuda& cuda = rig.rig().device(rank);
        const CudaStream compute = cuda.create_stream(false);
        const CudaEvent ready = cuda.create_event(EventKind::ordering);
        rig.rig().cuda().enqueue(compute, [opened] { opened.wait(); });
        cuda.record(ready, compute);
        const OrderEvents events(cuda, {ready});
        std::vector<std::vector<float>> data(1, std::vector<float>(16, 1));
        Request request = sum_of(data, routed);
        request.order = events.order();
        Pending(mesh, request).get();
        EXPECT_FALSE(cuda.passed(events.order().started));
        EXPECT_FALSE(cuda.passed(events.order().done));
        if (++launched == 4) gate.set_value();
        cuda.synchronize(events.order().done);
        EXPECT_EQ(data[0], std::vector<float>(16, 4));
        cuda.destroy(ready);
        cuda.destroy(compute);
      },
      1);
}

TEST(StreamMesh, WhatCannotBeIsRefusedAndHarmsNothing) {
  const Topology topology = mesh({2, 2});
  StreamMeshRig rig(topology, 1);
  rig.on_each(
      [&](int rank, StreamMeshCommunicator& mesh) {
        TracedCuda& cuda = rig.rig().device(rank);
        std::vector<std::vector<float>> data(1, {1});
        const OrderEvents events(cuda, {});
        Request good = sum_of(data, schedule(topology, {{0, 1}}));
        good.order = events.order();
        const auto expect_refused = [&](const std::string& why, auto change) {
          Request request = good;
          change(request);
          const std::string message = message_of<UsageError>([&] { Pending(mesh, request).get(); });
          EXPECT_NE(message.find(why), std::string::npos) << message;
        };
        expect_refused("give it an order", [](Request& r) { r.order.reset(); });
        expect_refused("give it an order", [](Request& r) { r = Request(); });
        expect_refused("only all_reduces have one",
                       [](Request& r) { r.kind = Collective::broadcast; });
        expect_refused("do not scale", [](Request& r) { r.scale = 0.5; });
        expect_refused("no dimension 2", [](Request& r) { r.dimension = 2, r.schedule = nullptr; });
        expect_refused("no routes", [](Request& r) {
          r.schedule =
              std::make_shared<MeshSchedule>(MeshSchedule{Collective::all_reduce, {}, {{}, {}}});
        });
        expect_refused("root 7", [](Request& r) {
          r.kind = Collective::broadcast, r.root = 7, r.schedule = nullptr;
        });
        Pending(mesh, good).get();
        cuda.synchronize(events.order().done);
        EXPECT_EQ(data[0][0], 4.0F);
        EXPECT_EQ(*mesh.topology(), topology);
        EXPECT_EQ(mesh.rank(), rank);
        EXPECT_EQ(mesh.size(), 4);
        EXPECT_TRUE(mesh.stream_ordered());
        const auto expect_unfit = [&](const std::string& why, auto make) {
          const std::string message = message_of<UsageError>(make);
          EXPECT_NE(message.find(why), std::string::npos) << message;
        };
        const auto device = rig.rig().shared_device(rank);
        std::shared_ptr<Communicator> host = std::move(make_local_communicators(1)[0]);
        expect_unfit("complete when it is over",
                     [&] { StreamMeshCommunicator(test::mesh({1}), device, host, {nullptr}, 1); });
      },
      1);
}

// The rank that is lost keeps an axis group busy that is not aborted first, and others wait behind
// it.
TEST(StreamMesh, AnAbortEndsWhatALostRankLeftOnTheDevice) {
  for (int lost : {2, 3}) {
    const Topology topology = mesh({2, 2});
    FakeNcclOptions fake;
    fake.fails_on = 1;
    fake.fails_at = lost;
    StreamMeshRig rig(topology, 1, fake);
    const Schedule routed = schedule(topology, {{0, 1}, {1, 0}});
    NcclOptions patient;  // or what is aborted before what it waits for would be given up
    patient.close_timeout_s = 3600;
    std::promise<void> failed;
    const std::shared_future<void> seen = failed.get_future().share();
    std::promise<void> go;
    const std::shared_future<void> gone = go.get_future().share();
    std::atomic<int> launched = 0;
    // Ranks that come later still write to that of one that has gone.
    const std::vector<std::vector<float>> ones(1, std::vector<float>(16, 1));
    std::vector<std::vector<std::vector<float>>> routed_data(4, ones), flat_data(4, ones);
    rig.on_each(
        [&](int rank, StreamMeshCommunicator& mesh) {
          TracedCuda& cuda = rig.rig().device(rank);
          auto& data = routed_data[static_cast<size_t>(rank)];
          auto& other = flat_data[static_cast<size_t>(rank)];
          // Nothing fails before all of it has been launched.
          const CudaStream compute = cuda.create_stream(false);
          const CudaEvent ready = cuda.create_event(EventKind::ordering);
          rig.rig().cuda().enqueue(compute, [gone] { gone.wait(); });
          cuda.record(ready, compute);
          const OrderEvents events(cuda, {ready}), behind(cuda, {ready}), later(cuda, {});
          Request request = sum_of(data, routed), flat = sum_of(other, nullptr);
          request.order = events.order();
          flat.order = behind.order();
          Pending(mesh, request).get();
          Pending(mesh, flat).get();
          if (++launched == 4) go.set_value();
          if (rank == 1) {
            while (mesh.failure().empty()) std::this_thread::yield();
            failed.set_value();
          }
          seen.wait();
          mesh.abort();
          cuda.synchronize(behind.order().done);
          request.order = later.order();
          for (int again = 0; again < 2; ++again) {
            const std::string message =
                message_of<FaultError>([&] { Pending(mesh, request).get(); });
            EXPECT_NE(message.find("phase 0 of chunk"), std::string::npos) << message;
            EXPECT_NE(message.find("over dimension 'd"), std::string::npos) << message;
          }
          mesh.abort();
          cuda.destroy(ready);
          cuda.destroy(compute);
        },
        1, patient);
  }
}

// Nothing of the empty one is on the device, but it keeps its place.
TEST(StreamMesh, AWindowHoldsAcrossARequestWithNothingToDo) {
  const Topology topology = mesh({2, 2});
  StreamMeshRig rig(topology, 2);
  const std::vector<Asked> all = {{{64}, nullptr}, {{0}, nullptr, 0, true}, {{64}, nullptr, 256}};
  run_all<float>(rig, all, 2);
  const std::vector<Begin> begins = rig.rig().device(0).begins();
  ASSERT_EQ(begins.size(), 2);
  EXPECT_TRUE(begins[1].over.contains(0));
}

TEST(StreamMesh, PhasesAreLaunchedAsTheSimulatorTakesThemUp) {
  Random random(5);
  for (int i = 0; i < 40; ++i) {
    Topology topology = mesh({static_cast<int>(random(1, 3)), static_cast<int>(random(1, 4)), 2});
    for (Dimension& d : topology.dimensions)
      d.bytes_per_s = 1e8 * static_cast<double>(random(1, 50));
    const Schedule routed = random_schedule(topology, random);
    std::vector<std::vector<ChunkPhase>> order(topology.dimensions.size());
    std::vector<int> passed(routed->routes.size());
    for (const LinePhase& phase : launch_order(topology, *routed, 1e6)) {
      order[static_cast<size_t>(phase.dimension)].push_back(phase.at);
      EXPECT_EQ(passed[static_cast<size_t>(phase.at.chunk)]++, phase.at.phase);
    }
    EXPECT_EQ(order, routed->order);
  }
  // Speeds decide which phases are taken up beside each other.
  Topology uneven = mesh({2, 2});
  const Schedule routed = schedule(uneven, {{0, 1}, {0, 1}, {0, 1}, {0, 1}});
  const auto even = launch_order(uneven, *routed, 1e8);
  uneven.dimensions[1].bytes_per_s = 1e7;
  EXPECT_NE(launch_order(uneven, *routed, 1e8), even);
}

TEST(StreamMesh, SpeedsThatWereMeasuredChangeTheOrderOfLaunches) {
  const Topology topology = mesh({2, 2});
  Topology measured = topology;
  measured.dimensions[1].bytes_per_s = 1e6;
  StreamMeshRig rig(topology, 1);
  const Schedule routed = schedule(measured, {{0, 1}, {0, 1}, {1, 0}, {0, 1}});
  rig.on_each(
      [&](int rank, StreamMeshCommunicator& mesh) {
        TracedCuda& cuda = rig.rig().device(rank);
        for (int i = 0; i < 2; ++i) {
          const OrderEvents events(cuda, {});
          std::vector<std::vector<float>> data(1, std::vector<float>(16, 1));
          Request request = sum_of(data, routed);
          request.order = events.order();
          Pending(mesh, request).get();
          cuda.synchronize(events.order().done);
          EXPECT_EQ(data[0], std::vector<float>(16, 4));
          mesh.set_speeds(measured);
        }
        EXPECT_NE(message_of<UsageError>([&] { mesh.set_speeds(test::mesh({4})); }).find("sizes"),
                  std::string::npos);
      },
      1);
}

}  // namespace
}  // namespace usbyte
