// SPDX-License-Identifier: Apache-2.0
// Time, bandwidth and correctness of every collective of a communicator.

#include <algorithm>
#include <barrier>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench.h"
#include "comm/local_communicator.h"
#include "cuda/cuda_device.h"
#include "cuda/nccl/nccl_communicator.h"
#include "usbyte/env.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace {

using namespace usbyte;
using bench::fixed;

constexpr const char* kAbout =
    "Runs collectives of growing size among ranks and checks every result.\n\n"
    "  size     bytes S of one rank's buffer: what it reduces, or receives in all\n"
    "  count    elements of that buffer\n"
    "  time     mean of --iters calls, one after the other, of the slowest rank; the calls block,\n"
    "           those of nccl follow one another on the device\n"
    "  algbw    S / time\n"
    "  busbw    algbw times a factor that makes it comparable with the speed of the links,\n"
    "           whatever the number n of ranks; as in nccl-tests, doc/PERFORMANCE.md:\n"
    "             all_reduce                              2 (n - 1) / n\n"
    "             reduce_scatter, all_gather, all_to_all  (n - 1) / n\n"
    "             broadcast                               1\n"
    "  #wrong   elements that differ from the exact result, over all ranks\n\n"
    "Exit code: 0, 1 if any element is wrong, 2 on an error. 1 GB = 10^9 bytes.";

struct Job {
  Collective kind;
  DType dtype;
  ReduceOp reduce;
  int ranks;
  int64_t count;
};

struct Result {
  double seconds = 0;
  int64_t wrong = 0;
};

double bus_factor(Collective kind, int n) {
  const double share = static_cast<double>(n - 1) / n;
  if (kind == Collective::broadcast) return 1;
  return kind == Collective::all_reduce ? 2 * share : share;
}

ReduceOp reduction(const std::string& text) {
  constexpr const char* kNames[] = {"sum", "min", "max", "product"};
  for (uint8_t i = 0; i < 4; ++i) {
    if (text == kNames[i]) return static_cast<ReduceOp>(i);
  }
  throw UsageError("--redop '" + text + "' must be sum, min, max or product");
}

// Small whole numbers, so that every reduction is exact in every type and any order.
int64_t value(const Job& job, int rank, int64_t i) {
  const uint64_t mixed =
      static_cast<uint64_t>(i) * 2654435761U + static_cast<uint64_t>(rank) * 40503U;
  return 1 + static_cast<int64_t>((mixed >> 8) % (job.reduce == ReduceOp::product ? 2 : 97));
}

int64_t reduced(const Job& job, int64_t i) {
  int64_t all = value(job, 0, i);
  for (int r = 1; r < job.ranks; ++r) {
    const int64_t v = value(job, r, i);
    switch (job.reduce) {
      case ReduceOp::sum:
        all += v;
        break;
      case ReduceOp::product:
        all *= v;
        break;
      case ReduceOp::min:
        all = std::min(all, v);
        break;
      case ReduceOp::max:
        all = std::max(all, v);
        break;
    }
  }
  return all;
}

// What `rank` must find at element `i`.
int64_t expected(const Job& job, int rank, int64_t i) {
  const int64_t chunk = (job.count + job.ranks - 1) / job.ranks;
  switch (job.kind) {
    case Collective::all_gather:
      return value(job, static_cast<int>(i / chunk), i);
    case Collective::all_to_all:
      return value(job, static_cast<int>(i / chunk), rank * chunk + i % chunk);
    case Collective::broadcast:
      return value(job, 0, i);
    default:
      return reduced(job, i);
  }
}

// One rank of a backend.
struct Rank {
  std::unique_ptr<Communicator> communicator;
  std::shared_ptr<Cuda> device;  // null: the memory is the host's
};

// Memory of a rank; on a device, with a copy of it on the host.
template <typename T>
class Memory {
 public:
  Memory(Cuda* device, size_t count) : device_(device), host_(count) {
    if (!device_) return;
    stream_ = device_->create_stream(false);
    memory_ = device_->allocate(bytes());
    upload();
  }
  ~Memory() {
    if (!device_) return;
    device_->free(memory_);
    device_->destroy(stream_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() { return device_ ? memory_ : host_.data(); }
  std::vector<T>& host() { return host_; }
  void upload() { copy(memory_, host_.data()); }
  void download() { copy(host_.data(), memory_); }

 private:
  size_t bytes() const { return host_.size() * sizeof(T); }
  void copy(void* to, const void* from) {
    if (!device_) return;
    device_->copy(to, from, bytes(), stream_);
    device_->synchronize(stream_);
  }

  Cuda* const device_;
  std::vector<T> host_;
  CudaStream stream_;
  void* memory_ = nullptr;
};

// One rank's buffers.
template <typename T>
class Buffer {
 public:
  Buffer(const Job& job, int rank, Cuda* device)
      : job_(job),
        rank_(rank),
        recv_(device, static_cast<size_t>(job.count)),
        send_(device, job.kind == Collective::all_to_all ? recv_.host().size() : 0) {}

  Request request() {
    Request out{job_.kind, job_.dtype, job_.reduce, 0, {}, {{recv_.data(), job_.count}}};
    if (has_send()) out.send = {{send_.data(), job_.count}};
    return out;
  }
  void fill() {
    Memory<T>& input = has_send() ? send_ : recv_;
    for (size_t i = 0; i < input.host().size(); ++i) {
      input.host()[i] = static_cast<T>(value(job_, rank_, static_cast<int64_t>(i)));
    }
    input.upload();
  }
  int64_t wrong() {
    recv_.download();
    Block defined{0, job_.count};
    if (job_.kind == Collective::reduce_scatter) defined = shard(defined, rank_, job_.ranks);
    int64_t out = 0;
    for (int64_t i = defined.begin; i < defined.end; ++i) {
      const T want = static_cast<T>(expected(job_, rank_, i));
      out += std::memcmp(&recv_.host()[static_cast<size_t>(i)], &want, sizeof want) ? 1 : 0;
    }
    return out;
  }

 private:
  bool has_send() { return !send_.host().empty(); }

  const Job& job_;
  int rank_;
  Memory<T> recv_, send_;
};

// The calls that are timed.
class Calls {
 public:
  Calls(const Rank& rank, Request request)
      : communicator_(*rank.communicator),
        device_(rank.device.get()),
        request_(std::move(request)) {
    if (!device_) return;
    // Not awaited: being woken from a sleep would be measured, too.
    request_.order = {
        {}, device_->create_event(EventKind::ordering), device_->create_event(EventKind::ordering)};
  }
  ~Calls() {
    if (!device_) return;
    device_->destroy(request_.order->started);
    device_->destroy(request_.order->done);
  }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  // Returns when all are over.
  void run(int64_t count) {
    for (int64_t i = 0; i < count; ++i) communicator_.run(request_);
    if (device_ && count > 0) device_->synchronize(request_.order->done);
  }

 private:
  Communicator& communicator_;
  Cuda* const device_;
  Request request_;
};

// Buffers start as zeros, which no number of reductions makes overflow; the checked call comes
// last.
template <typename T>
Result measure(const Job& job, const Rank& rank, std::barrier<>& start, int64_t warmup,
               int64_t iters) {
  Buffer<T> buffer(job, rank.communicator->rank(), rank.device.get());
  Calls calls(rank, buffer.request());
  // What allocates memory may wait for other ranks' kernels, and those for this rank.
  start.arrive_and_wait();
  calls.run(warmup);
  start.arrive_and_wait();
  const double begin = now_s();
  calls.run(iters);
  Result result{(now_s() - begin) / static_cast<double>(iters), 0};
  buffer.fill();
  calls.run(1);
  result.wrong = buffer.wrong();
  return result;
}

Result measure(const Job& job, const Rank& rank, std::barrier<>& start, int64_t warmup,
               int64_t iters) {
  switch (job.dtype) {
    case DType::float32:
      return measure<float>(job, rank, start, warmup, iters);
    case DType::float64:
      return measure<double>(job, rank, start, warmup, iters);
    case DType::int32:
      return measure<int32_t>(job, rank, start, warmup, iters);
    case DType::int64:
      return measure<int64_t>(job, rank, start, warmup, iters);
    default:
      throw UsageError("--dtype must be float32, float64, int32 or int64");
  }
}

// Runs `body(rank)` on one thread for each rank; throws what one of them has thrown.
template <typename Body>
void on_each(size_t ranks, Body body) {
  std::vector<std::exception_ptr> errors(ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// The slowest rank's time, the sum of what is wrong.
Result measure(const Job& job, const std::vector<Rank>& ranks, int64_t warmup, int64_t iters) {
  std::barrier start(job.ranks);
  std::vector<Result> results(ranks.size());
  on_each(ranks.size(), [&](size_t r) {
    try {
      results[r] = measure(job, ranks[r], start, warmup, iters);
    } catch (...) {
      for (const Rank& rank : ranks) rank.communicator->abort();
      start.arrive_and_drop();
      throw;
    }
  });
  Result all;
  for (const Result& result : results) {
    all.seconds = std::max(all.seconds, result.seconds);
    all.wrong += result.wrong;
  }
  return all;
}

// Each rank has a GPU to itself. NCCL tells GPUs that ranks share by host and process, so those of
// one process share one only where NCCL 2.30 has been told to allow it.
std::vector<Rank> nccl_ranks(int size) {
  const std::shared_ptr<NcclApi> nccl = load_nccl(Env::read().nccl_library);
  const CudaInfo cuda = cuda_info();
  const int devices = static_cast<int>(cuda.devices.size());
  if (devices == 0) throw UsageError("--backend nccl: " + cuda.reason);
  if (size == 0) size = devices;
  if (size > devices && nccl->version() < 23000) {
    throw UsageError("--ranks " + std::to_string(size) + " on " + std::to_string(devices) +
                     " GPUs: ranks of one process share a GPU from NCCL 2.30 on, with "
                     "NCCL_MULTI_RANK_GPU_ENABLE=1; this is " +
                     nccl_version_text(nccl->version()));
  }
  std::vector<NcclId> ids(1);
  if (nccl->unique_id(&ids[0]) != NcclResult::success) {
    throw FaultError("ncclGetUniqueId: " + nccl->last_error(nullptr));
  }
  std::vector<Rank> ranks(static_cast<size_t>(size));
  on_each(ranks.size(), [&](size_t r) {
    const int rank = static_cast<int>(r);
    ranks[r].device = make_cuda(rank % devices);
    ranks[r].communicator =
        std::make_unique<NcclCommunicator>(nccl, ranks[r].device, rank, size, ids);
  });
  return ranks;
}

std::vector<Rank> make_ranks(const bench::Options& options) {
  const std::string& backend = options.text("backend");
  if (backend == "nccl") return nccl_ranks(static_cast<int>(options.integer("ranks")));
  const int size = static_cast<int>(options.integer("ranks", 1));
  if (backend != "local") {
    throw UsageError("--backend '" + backend + "' is unknown; there are local and nccl");
  }
  std::vector<Rank> ranks;
  for (auto& c : make_local_communicators(size, {options.real("alpha"), options.real("beta")})) {
    ranks.push_back({std::move(c), nullptr});
  }
  return ranks;
}

// NCCL's communicators wait for each other's end.
void end(std::vector<Rank>& ranks) {
  on_each(ranks.size(), [&](size_t r) { ranks[r].communicator.reset(); });
}

std::vector<Collective> chosen(const std::string& op) {
  const std::vector<Collective> all = {Collective::all_reduce, Collective::reduce_scatter,
                                       Collective::all_gather, Collective::broadcast,
                                       Collective::all_to_all};
  if (op == "all") return all;
  for (Collective kind : all) {
    if (name(kind) == op) return {kind};
  }
  throw UsageError(
      "--op '" + op +
      "' must be all_reduce, reduce_scatter, all_gather, broadcast, all_to_all or all");
}

int bench_collective(const bench::Options& options) {
  const DType dtype = dtype_from_name(options.text("dtype"));
  const ReduceOp reduce = reduction(options.text("redop"));
  const int64_t low = std::max(options.integer("min-bytes"), itemsize(dtype)),
                high = options.integer("max-bytes", low);
  const int64_t factor = options.integer("factor", 2);
  std::vector<Rank> all = make_ranks(options);
  const int ranks = static_cast<int>(all.size());

  std::vector<std::vector<std::string>> table = {{"op", "size(B)", "count", "type", "redop",
                                                  "time(us)", "algbw(GB/s)", "busbw(GB/s)",
                                                  "#wrong"}};
  auto rows = nlohmann::ordered_json::array();
  int64_t wrong = 0;
  for (Collective kind : chosen(options.text("op"))) {
    for (int64_t bytes = low; bytes <= high;
         bytes = bytes > high / factor ? high + 1 : bytes * factor) {
      Job job{kind, dtype, reduce, ranks, bytes / itemsize(dtype)};
      if (kind == Collective::all_to_all)
        job.count = std::max<int64_t>(job.count / ranks, 1) * ranks;
      const Result r = measure(job, all, options.integer("warmup"), options.integer("iters", 1));
      const int64_t size = job.count * itemsize(dtype);
      const double algbw = static_cast<double>(size) / r.seconds * 1e-9;
      const double busbw = algbw * bus_factor(kind, ranks);
      const std::string redop = reduces(kind) ? options.text("redop") : "none";
      wrong += r.wrong;
      table.push_back({std::string(name(kind)), std::to_string(size), std::to_string(job.count),
                       std::string(name(dtype)), redop, fixed(r.seconds * 1e6, 2), fixed(algbw, 3),
                       fixed(busbw, 3), std::to_string(r.wrong)});
      rows.push_back({{"op", name(kind)},
                      {"size_bytes", size},
                      {"count", job.count},
                      {"dtype", name(dtype)},
                      {"redop", redop},
                      {"time_s", r.seconds},
                      {"algbw_bytes_per_s", algbw * 1e9},
                      {"busbw_bytes_per_s", busbw * 1e9},
                      {"wrong", r.wrong}});
    }
  }
  end(all);
  const std::string ran = std::to_string(ranks) + " ranks, " + options.text("backend") + " backend";
  return bench::finish(options, table, ran, "elements", wrong,
                       {{"benchmark", "collective"}, {"rows", std::move(rows)}});
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options(kAbout);
  options
      .flag("backend", "local",
            "communicator: local (host memory) or nccl (one GPU each; the system's NCCL, or what "
            "USBYTE_NCCL_LIB names); ranks are threads")
      .flag("ranks", "4", "number of ranks; 0 with nccl: one for each GPU")
      .flag("op", "all", "all_reduce, reduce_scatter, all_gather, broadcast, all_to_all or all")
      .flag("min-bytes", "1K", "smallest size; K, M and G are 2^10, 2^20 and 2^30")
      .flag("max-bytes", "16M", "largest size")
      .flag("factor", "4", "each size is this many times the one before")
      .flag("iters", "20", "timed calls for each size")
      .flag("warmup", "5", "calls before them")
      .flag("dtype", "float32", "float32, float64, int32 or int64")
      .flag("redop", "sum", "sum, min, max or product")
      .flag("alpha", "0", "emulated startup of a call, seconds")
      .flag("beta", "0", "emulated transfer time, seconds per byte");
  return bench::run(std::move(options), argc, argv, bench_collective);
}
