// SPDX-License-Identifier: Apache-2.0
#include "cuda/nccl/nccl_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/cpu_collective.h"
#include "nccl_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::Begin;
using test::FakeNcclOptions;
using test::NcclCall;
using test::NcclRig;
using test::OrderEvents;
using test::Pending;
using test::Random;

/// Elements in any type, as numbers; those used are whole and small, so that all types hold them.
class Values {
 public:
  Values(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(std::max<int64_t>(count, 1) * itemsize(dtype))) {}

  void* data() { return bytes_.data(); }
  int64_t get(int64_t i) const {
    int64_t out = 0;
    with_type([&](auto* typed) { out = static_cast<int64_t>(number(typed[i])); });
    return out;
  }
  void set(int64_t i, int64_t value) {
    with_type([&](auto* typed) {
      using T = std::remove_cvref_t<decltype(*typed)>;
      if constexpr (std::is_arithmetic_v<T>) {
        typed[i] = static_cast<T>(value);
      } else {
        typed[i] = from_float<T>(static_cast<float>(value));
      }
    });
  }

 private:
  template <typename T>
  static double number(T value) {
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<double>(value);
    } else {
      return to_float(value);
    }
  }
  template <typename Use>
  void with_type(Use use) const {
    void* memory = const_cast<std::byte*>(bytes_.data());
    switch (dtype_) {
      case DType::float32:
        return use(static_cast<float*>(memory));
      case DType::float64:
        return use(static_cast<double*>(memory));
      case DType::float16:
        return use(static_cast<Half*>(memory));
      case DType::bfloat16:
        return use(static_cast<BFloat16*>(memory));
      case DType::int32:
        return use(static_cast<int32_t*>(memory));
      case DType::int64:
        return use(static_cast<int64_t*>(memory));
      case DType::int8:
        return use(static_cast<int8_t*>(memory));
      case DType::uint8:
        return use(static_cast<uint8_t*>(memory));
    }
  }

  DType dtype_;
  std::vector<std::byte> bytes_;
};

/// A collective whose result is known.
struct Job {
  Collective kind = Collective::all_reduce;
  DType dtype = DType::float32;
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;
  std::vector<int64_t> counts;
  int64_t window_bytes = 0;
  bool fence = false;
  bool in_place = true;
  double scale = 1;

  int64_t bytes() const {
    int64_t out = 0;
    for (int64_t count : counts) out += count * itemsize(dtype);
    return out;
  }
  static int64_t input(int rank, size_t span, int64_t i) {
    return 1 + (i * 7 + rank * 5 + static_cast<int64_t>(span) * 3) % 4;
  }
  int64_t reduced(int size, size_t span, int64_t i) const {
    int64_t out = input(0, span, i);
    for (int r = 1; r < size; ++r) {
      const int64_t v = input(r, span, i);
      if (reduce == ReduceOp::sum) out += v;
      if (reduce == ReduceOp::product) out *= v;
      if (reduce == ReduceOp::min) out = std::min(out, v);
      if (reduce == ReduceOp::max) out = std::max(out, v);
    }
    return static_cast<int64_t>(static_cast<double>(out) * scale);
  }
  /// What `rank` must find there; -1 where anything may be.
  int64_t expected(int rank, int size, size_t span, int64_t i) const {
    const int64_t count = counts[span];
    const Block own = shard({0, count}, rank, size);
    switch (kind) {
      case Collective::all_reduce:
        return reduced(size, span, i);
      case Collective::reduce_scatter:
        return own.begin <= i && i < own.end ? reduced(size, span, i) : -1;
      case Collective::all_gather: {
        for (int r = 0; r < size; ++r) {
          const Block its = shard({0, count}, r, size);
          if (its.begin <= i && i < its.end) return input(r, span, i);
        }
        return -1;
      }
      case Collective::broadcast:
        return input(root, span, i);
      case Collective::all_to_all: {
        const int64_t chunk = count / size;
        return input(static_cast<int>(i / chunk), span, rank * chunk + i % chunk);
      }
      default:
        return -1;
    }
  }
};

Job random_job(Random& random, int size) {
  Job job;
  job.kind = static_cast<Collective>(random(0, 5));
  job.dtype = static_cast<DType>(random(0, 7));
  job.reduce = static_cast<ReduceOp>(random(0, 3));
  if (itemsize(job.dtype) == 1 && job.reduce == ReduceOp::product) job.reduce = ReduceOp::max;
  job.root = static_cast<int>(random(0, size - 1));
  if (job.kind == Collective::all_to_all) {
    job.counts = {random(0, 9) * size};
    job.in_place = random.one_in(2);
  } else if (job.kind != Collective::barrier) {
    for (int64_t n = random(1, 3); n > 0; --n) {
      job.counts.push_back(random.one_in(3) ? random(1, 9) * size : random(0, 40));
    }
  }
  job.window_bytes = random.one_in(4) ? 0 : random(1, 400);
  job.fence = random.one_in(5);
  return job;
}

/// A job on one rank's device: a stream of the test's own writes its inputs, late, behind what the
/// job's buffers had to do before, and takes its results away.
class Running {
 public:
  Running(Cuda& cuda, EmulatedCuda& emulated, CudaStream compute, const Job& job, int rank)
      : job_(job),
        ready_(cuda.create_event(EventKind::ordering)),
        events_(cuda, {ready_}),
        cuda_(cuda) {
    for (int64_t count : job.counts) {
      recv_.emplace_back(job.dtype, count);
      if (!job.in_place) send_.emplace_back(job.dtype, count);
    }
    emulated.enqueue(compute, [this, rank] {
      std::vector<Values>& inputs = job_.in_place ? recv_ : send_;
      for (size_t s = 0; s < inputs.size(); ++s) {
        for (int64_t i = 0; i < job_.counts[s]; ++i) inputs[s].set(i, Job::input(rank, s, i));
      }
    });
    cuda.record(ready_, compute);
    request_ = {job.kind, job.dtype, job.reduce, job.root, {}, {}};
    for (size_t s = 0; s < job.counts.size(); ++s) {
      request_.recv.push_back({recv_[s].data(), job.counts[s]});
      if (job.kind == Collective::all_to_all) {
        request_.send.push_back({(job.in_place ? recv_ : send_)[s].data(), job.counts[s]});
      }
    }
    request_.window_bytes = job.window_bytes;
    request_.fence = job.fence;
    request_.scale = job.scale;
    request_.order = events_.order();
  }
  ~Running() { cuda_.destroy(ready_); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  const Request& request() const { return request_; }
  void read(EmulatedCuda& emulated, CudaStream compute) {
    cuda_.wait(compute, events_.order().done);
    emulated.enqueue(compute, [this] { results_ = recv_; });
  }
  void check(int rank, int size) const {
    ASSERT_EQ(results_.size(), job_.counts.size());
    for (size_t s = 0; s < results_.size(); ++s) {
      for (int64_t i = 0; i < job_.counts[s]; ++i) {
        const int64_t want = job_.expected(rank, size, s, i);
        if (want < 0) continue;
        ASSERT_EQ(results_[s].get(i), want)
            << name(job_.kind) << " of " << name(job_.dtype) << ", rank " << rank << " of " << size
            << ", span " << s << " of " << job_.counts[s] << ", element " << i;
      }
    }
  }

 private:
  const Job job_;
  const CudaEvent ready_;
  const OrderEvents events_;
  Cuda& cuda_;
  std::vector<Values> recv_, send_, results_;
  Request request_;
};

/// Launches all jobs without waiting for any, and checks the results at the end.
void run_jobs(NcclRig& rig, NcclCommunicator& communicator, const std::vector<Job>& jobs) {
  const int rank = communicator.rank();
  Cuda& cuda = rig.device(rank);
  const CudaStream compute = cuda.create_stream(false);
  std::vector<std::unique_ptr<Running>> running;
  for (const Job& job : jobs) {
    running.push_back(std::make_unique<Running>(cuda, rig.cuda(), compute, job, rank));
    Pending pending(communicator, running.back()->request());
    pending.get();
    if (running.size() > 3) running[running.size() - 4]->read(rig.cuda(), compute);
  }
  for (size_t i = running.size() < 4 ? 0 : running.size() - 3; i < running.size(); ++i) {
    running[i]->read(rig.cuda(), compute);
  }
  cuda.synchronize(compute);
  for (const auto& r : running) r->check(rank, rig.size());
  EXPECT_EQ(communicator.failure(), "");
  cuda.destroy(compute);
}

/// What had to be in order on the device when each job's launch began.
void check_order(std::vector<Begin> begins, const std::vector<Job>& jobs, int size, int slots) {
  std::vector<Job> launched;
  for (const Job& job : jobs) {
    const bool on_nccl = job.kind != Collective::all_to_all || size > 1;
    if (job.kind == Collective::barrier || (job.bytes() > 0 && on_nccl)) launched.push_back(job);
  }
  ASSERT_EQ(begins.size(), launched.size());
  for (const Begin& begin : begins) {
    const Job& job = launched[static_cast<size_t>(begin.op)];
    int beside = 0;
    int64_t bytes = job.bytes();
    for (int before = 0; before < begin.op; ++before) {
      EXPECT_TRUE(begin.started.contains(before))
          << "launch " << begin.op << " may begin before launch " << before;
      if (begin.over.contains(before)) continue;
      ++beside;
      bytes += launched[static_cast<size_t>(before)].bytes();
    }
    EXPECT_LT(beside, slots) << "launch " << begin.op;
    if (beside == 0) continue;
    EXPECT_FALSE(job.fence) << "launch " << begin.op;
    if (job.window_bytes > 0) {
      EXPECT_LE(bytes, job.window_bytes) << "launch " << begin.op;
    }
  }
}

TEST(NcclCommunicator, MovesWhatItShouldInTheOrderItShould) {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const int size = static_cast<int>(random(1, 4)), slots = static_cast<int>(random(1, 4));
    FakeNcclOptions fake;
    fake.polls = static_cast<int>(random(0, 3));
    NcclRig rig(size, slots, fake, {.most_delay_s = 4e-4, .seed = seed});
    std::vector<Job> jobs;
    for (int i = 0; i < 25; ++i) jobs.push_back(random_job(random, size));
    rig.on_each([&](int, NcclCommunicator& communicator) { run_jobs(rig, communicator, jobs); });
    for (int r = 0; r < size; ++r) check_order(rig.device(r).begins(), jobs, size, slots);
    EXPECT_EQ(rig.nccl().aborted(), 0);
  }
}

TEST(NcclCommunicator, RunsSideBySideWhatTheWindowAllows) {
  NcclRig rig(2, 3);
  const std::vector<Job> jobs(6, Job{.counts = {10}, .window_bytes = 80});
  rig.on_each([&](int, NcclCommunicator& communicator) { run_jobs(rig, communicator, jobs); });
  for (const Begin& begin : rig.device(0).begins()) {
    if (begin.op == 0) continue;
    EXPECT_FALSE(begin.over.contains(begin.op - 1)) << begin.op;
    if (begin.op > 1) {
      EXPECT_TRUE(begin.over.contains(begin.op - 2)) << begin.op;
    }
  }
}

TEST(NcclCommunicator, AnOpWaitsForThoseBeforeItToBeReady) {
  NcclRig rig(1, 2);
  rig.on_each([&](int, NcclCommunicator& communicator) {
    Cuda& cuda = rig.device(0);
    const CudaStream compute = cuda.create_stream(false);
    const CudaEvent ready = cuda.create_event(EventKind::ordering);
    const OrderEvents late(cuda, {ready}), early(cuda, {});
    rig.cuda().delay(compute, 0.05);
    cuda.record(ready, compute);
    float a = 1, b = 1;
    Request first{Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {{&a, 1}}};
    Request second = first;
    second.recv = {{&b, 1}};
    first.order = late.order();
    second.order = early.order();
    Pending(communicator, first).get();
    Pending(communicator, second).get();
    cuda.synchronize(early.order().done);
    EXPECT_TRUE(cuda.passed(ready));
    cuda.synchronize(late.order().done);
    EXPECT_GE(cuda.elapsed_s(late.order().started, late.order().done), 0);
    cuda.destroy(ready);
    cuda.destroy(compute);
  });
}

TEST(NcclCommunicator, EqualShardsGoAsOneCollective) {
  NcclRig rig(3, 1);
  const std::vector<Job> jobs = {{.kind = Collective::reduce_scatter, .counts = {9, 4}},
                                 {.kind = Collective::all_gather, .counts = {9, 4}}};
  rig.on_each([&](int, NcclCommunicator& communicator) { run_jobs(rig, communicator, jobs); });
  const auto kinds = rig.nccl().kinds();
  const auto count = [&](NcclCall::Kind kind) {
    return std::count(kinds.begin(), kinds.end(), kind);
  };
  EXPECT_EQ(count(NcclCall::Kind::reduce_scatter), 3);
  EXPECT_EQ(count(NcclCall::Kind::all_gather), 3);
  // 4 elements on 3 ranks are shards of 2, 2 and 0.
  EXPECT_EQ(count(NcclCall::Kind::reduce), 6);
  EXPECT_EQ(count(NcclCall::Kind::broadcast), 6);
}

TEST(NcclCommunicator, ScalesSums) {
  for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    NcclRig rig(2, 1);
    const std::vector<Job> jobs = {
        {.dtype = dtype, .counts = {5}, .scale = 3},
        {.kind = Collective::reduce_scatter, .dtype = dtype, .counts = {7, 8}, .scale = 2}};
    rig.on_each([&](int, NcclCommunicator& communicator) { run_jobs(rig, communicator, jobs); });
  }
}

TEST(NcclCommunicator, HostsRefuseAScale) {
  float value = 1;
  Request request{Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {{&value, 1}}};
  EXPECT_EQ(problem(request, 1), "");
  request.scale = 0.5;
  EXPECT_NE(problem(request, 1).find("does not scale"), std::string::npos);
}

TEST(NcclCommunicator, WithoutAnOrderItCompletesWhenTheDeviceIsDone) {
  NcclRig rig(3, 2, {}, {.most_delay_s = 1e-3});
  rig.on_each([&](int rank, NcclCommunicator& communicator) {
    for (int i = 0; i < 5; ++i) {
      std::vector<float> values(4, static_cast<float>(rank + i));
      communicator.run(
          {Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {{values.data(), 4}}});
      EXPECT_EQ(values, std::vector<float>(4, static_cast<float>(3 + 3 * i)));
    }
    communicator.run({});
  });
}

TEST(NcclCommunicator, LaunchReturnsBeforeTheDeviceIsDone) {
  NcclRig rig(1, 1);
  rig.on_each([&](int, NcclCommunicator& communicator) {
    Cuda& cuda = rig.device(0);
    const CudaStream compute = cuda.create_stream(false);
    const CudaEvent ready = cuda.create_event(EventKind::ordering);
    const OrderEvents events(cuda, {ready});
    std::promise<void> gate;
    rig.cuda().enqueue(compute, [opened = gate.get_future().share()] { opened.wait(); });
    cuda.record(ready, compute);
    float value = 1;
    Request request{Collective::all_reduce, DType::float32, ReduceOp::sum, 0, {}, {{&value, 1}}};
    request.order = events.order();
    Pending(communicator, request).get();
    EXPECT_FALSE(cuda.passed(events.order().done));
    gate.set_value();
    cuda.synchronize(events.order().done);
    cuda.destroy(compute);
    cuda.destroy(ready);
  });
}

TEST(NcclCommunicator, ABadRequestFailsAndHarmsNothing) {
  NcclRig rig(2, 2);
  rig.on_each([&](int rank, NcclCommunicator& communicator) {
    int32_t value = rank + 1;
    Request request{Collective::all_reduce, DType::int32, ReduceOp::sum, 0, {}, {{&value, 1}}};
    request.scale = 0.5;
    const auto error = [&] {
      return test::message_of<UsageError>([&] { communicator.run(request); });
    };
    EXPECT_NE(error().find("rank " + std::to_string(rank) + ": all_reduce of int32 with a scale"),
              std::string::npos);
    request.scale = 1;
    request.kind = Collective::broadcast;
    request.root = 2;
    EXPECT_NE(error().find("root 2"), std::string::npos);
    request.kind = Collective::all_to_all;
    EXPECT_NE(error().find("equal counts"), std::string::npos);
    request.kind = Collective::all_reduce;
    communicator.run(request);
    EXPECT_EQ(value, 3);
  });
}

}  // namespace
}  // namespace usbyte
