// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/nccl/nccl.h"
#include "fake_nccl_data.h"
#include "traced_cuda.h"

namespace usbyte {

/// Of FakeNccl; its mutex guards all of it.
struct NcclComm {
  struct NcclWorld* world = nullptr;
  int rank = 0;
  int process = 0;                         // and its device
  NcclResult error = NcclResult::success;  // stays
  std::function<bool()> progress;          // while in progress: whether that is over
  int polls_left = 0;
  bool finalized = false, ended = false, aborted = false;
  int64_t launches = 0;
  int on_device = 0;  // launches that are on a stream and not over
  std::set<void*> handles;
  std::set<NcclWindow*> windows;
  int64_t window_calls = 0;
};

struct NcclWindow {};

/// All ranks of one id.
struct NcclWorld {
  struct Meeting;

  int index = 0;
  int size = 0;
  std::map<int, NcclComm*> ranks;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;  // by launch
};

}  // namespace usbyte

namespace usbyte::test {

/// How FakeNccl behaves; set before use.
struct FakeNcclOptions {
  int version = 22809;
  int polls = 0;                                    ///< how often a call is still in progress
  double call_s = 0;                                ///< time that a thread is inside a call
  std::optional<int> init_fails_on = std::nullopt;  ///< rank
  bool init_hangs = false;                          ///< nobody ever finds the others
  bool launch_hangs = false;                        ///< nothing ever gets onto a stream
  bool finalize_hangs = false;
  double abort_s = 0;            ///< time that an abort takes
  bool windows = true;           ///< the machine has a use for them
  size_t refused_count = 0;      ///< an all_reduce of so many elements is an error, for the call
  int64_t hangs_from = 1 << 30;  ///< launch of each communicator, from which on none ends
  std::optional<int> fails_on =
      std::nullopt;  ///< process whose launch `fails_at` on the device, over all
  int fails_at = 0;  ///< communicators, never ends and raises an error
};

/// NCCL among ranks that are threads of one process, on the streams of emulated devices. Data
/// really moves, when all ranks have got there. Misuse, which would hang, corrupt or crash with
/// NCCL, is collected by `violations`.
class FakeNccl final : public NcclApi {
 public:
  /// Outlives the devices, whose streams call it.
  FakeNccl(std::vector<TracedCuda*> devices, FakeNcclOptions options = {})
      : devices_(std::move(devices)), options_(options) {}

  /// Which device the communicators that this thread makes are on; that of their rank, unless it
  /// has been said.
  static inline thread_local std::optional<int> process;

  std::vector<std::string> violations() const {
    std::lock_guard lock(mutex_);
    return violations_;
  }
  /// Communicators, registrations, reductions and memory that were made and not given back.
  int64_t live() const {
    std::lock_guard lock(mutex_);
    int64_t out = static_cast<int64_t>(scales_.size() + memory_.size());
    for (const auto& comm : comms_) {
      if (!comm->ended) ++out;
      // An abort takes registrations along.
      if (!comm->aborted) out += static_cast<int64_t>(comm->handles.size() + comm->windows.size());
    }
    return out;
  }
  int64_t aborted() const {
    std::lock_guard lock(mutex_);
    return std::count_if(comms_.begin(), comms_.end(), [](auto& comm) { return comm->aborted; });
  }
  /// What every communicator was made with.
  std::vector<NcclConfig> configs() const {
    std::lock_guard lock(mutex_);
    return configs_;
  }
  int64_t windows_made() const {
    std::lock_guard lock(mutex_);
    return windows_made_;
  }
  int64_t buffers_registered() const {
    std::lock_guard lock(mutex_);
    return buffers_registered_;
  }
  std::vector<NcclCall::Kind> kinds() const {
    std::lock_guard lock(mutex_);
    return kinds_;
  }
  /// Returns when `count` launches of all ranks have reached the device, over or not.
  void await_on_device(int64_t count) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ >= count; });
  }

  int version() const override { return options_.version; }
  const std::string& path() const override { return path_; }
  void with_device(int, const std::function<void()>& calls) override { calls(); }
  std::string error_string(NcclResult result) const override {
    return "fake error " + std::to_string(static_cast<int>(result));
  }
  std::string last_error(NcclComm*) const override { return "last words"; }

  NcclResult unique_id(NcclId* id) override {
    std::lock_guard lock(mutex_);
    *id = {};
    std::memcpy(id->bytes.data(), &next_id_, sizeof next_id_);
    ++next_id_;
    return NcclResult::success;
  }
  NcclResult comm_init(NcclComm** comm, int size, const NcclId& id, int rank,
                       const NcclConfig& config) override {
    std::lock_guard lock(mutex_);
    if (config.max_ctas > 0 || config.min_ctas > 0) since(kNcclCtaLimits, "CTA limits");
    configs_.push_back(config);
    int64_t key = 0;
    std::memcpy(&key, id.bytes.data(), sizeof key);
    NcclWorld& world = worlds_[key];
    world.index = static_cast<int>(key);
    world.size = size;
    comms_.push_back(std::make_unique<NcclComm>());
    *comm = comms_.back().get();
    (*comm)->world = &world;
    (*comm)->rank = rank;
    (*comm)->process = process.value_or(rank);
    if (options_.init_fails_on == rank) {
      (*comm)->error = NcclResult::system_error;
      return NcclResult::in_progress;
    }
    if (!world.ranks.emplace(rank, *comm).second) violate("two ranks " + std::to_string(rank));
    return begin(**comm, [this, &world] {
      return !options_.init_hangs && static_cast<int>(world.ranks.size()) == world.size;
    });
  }
  NcclResult comm_async_error(NcclComm* comm, NcclResult* state) override {
    const Inside inside(*this, comm);
    if (comm->progress && comm->polls_left-- <= 0 && comm->progress()) comm->progress = nullptr;
    *state = comm->error;
    if (comm->error == NcclResult::success && comm->progress) *state = NcclResult::in_progress;
    return NcclResult::success;
  }
  NcclResult comm_finalize(NcclComm* comm) override {
    const Inside inside(*this, comm);
    enter(comm, "finalize");
    comm->finalized = true;
    return begin(*comm, [this, comm] {
      if (options_.finalize_hangs) return false;
      return std::all_of(comm->world->ranks.begin(), comm->world->ranks.end(), [](auto& entry) {
        return entry.second->finalized && entry.second->on_device == 0;
      });
    });
  }
  NcclResult comm_destroy(NcclComm* comm) override {
    const Inside inside(*this, comm);
    enter(comm, "destroy");
    if (!comm->finalized) violate("destroyed without finalize");
    end(*comm);
    return NcclResult::success;
  }
  NcclResult comm_abort(NcclComm* comm) override {
    std::unique_lock lock(mutex_);
    if (comm->ended || comm->aborted) violate("aborted a communicator that has ended");
    if (inside_[comm->process] > 0) violate("aborted while another thread is inside");
    comm->aborted = true;
    changed_.notify_all();
    // As NCCL does: what is on its stream, or still held up there, has to end first.
    changed_.wait(lock, [comm] { return comm->on_device == 0; });
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::duration<double>(options_.abort_s));
    lock.lock();
    end(*comm);
    return NcclResult::success;
  }

  NcclResult mem_alloc(void** memory, size_t bytes) override {
    std::lock_guard lock(mutex_);
    since(kNcclMemory, "ncclMemAlloc");
    auto owned = std::make_unique<std::byte[]>(bytes);
    *memory = owned.get();
    memory_.emplace(*memory, std::move(owned));
    return NcclResult::success;
  }
  NcclResult mem_free(void* memory) override {
    std::lock_guard lock(mutex_);
    if (memory_.erase(memory) == 0) violate("freed memory of another kind");
    return NcclResult::success;
  }
  NcclResult comm_register(NcclComm* comm, void* memory, size_t, void** handle) override {
    const Inside inside(*this, comm);
    since(kNcclMemory, "ncclCommRegister");
    enter(comm, "register");
    ++buffers_registered_;
    comm->handles.insert(*handle = static_cast<std::byte*>(memory) + comm->handles.size());
    return begin(*comm, [] { return true; });
  }
  NcclResult comm_deregister(NcclComm* comm, void* handle) override {
    const Inside inside(*this, comm);
    enter(comm, "deregister");
    if (comm->on_device > 0) violate("deregistered under work");
    if (comm->handles.erase(handle) == 0) violate("deregistered what was not registered");
    return NcclResult::success;
  }
  NcclResult window_register(NcclComm* comm, void* memory, size_t, NcclWindow** window) override {
    const Inside inside(*this, comm);
    since(kNcclWindows, "ncclCommWindowRegister");
    enter(comm, "window_register");
    if (!memory_.contains(memory)) violate("a window of memory that ncclMemAlloc has not made");
    if (!options_.windows) return NcclResult::success;
    const int64_t call = ++comm->window_calls;
    return begin(*comm, [this, comm, window, call] {
      for (auto& [rank, other] : comm->world->ranks) {
        if (other->window_calls < call) return false;
      }
      windows_.push_back(std::make_unique<NcclWindow>());
      comm->windows.insert(*window = windows_.back().get());
      ++windows_made_;
      return true;
    });
  }
  NcclResult window_deregister(NcclComm* comm, NcclWindow* window) override {
    const Inside inside(*this, comm);
    enter(comm, "window_deregister");
    if (comm->on_device > 0) violate("deregistered a window under work");
    if (comm->windows.erase(window) == 0) violate("deregistered no window of this communicator");
    return NcclResult::success;
  }

  NcclResult reduction_create(NcclReduction* reduction, const void* scale, DType dtype,
                              NcclComm* comm) override {
    const Inside inside(*this, comm);
    enter(comm, "reduction_create");
    *reduction = static_cast<NcclReduction>(next_reduction_++);
    scales_[*reduction] = load(scale, 0, dtype);
    return NcclResult::success;
  }
  NcclResult reduction_destroy(NcclReduction reduction, NcclComm* comm) override {
    const Inside inside(*this, comm);
    enter(comm, "reduction_destroy");
    if (scales_.erase(reduction) == 0) violate("destroyed a reduction that was not created");
    return NcclResult::success;
  }

  NcclResult group_start() override {
    ++group().depth;
    return NcclResult::success;
  }
  NcclResult group_end() override {
    Group& group = this->group();
    if (--group.depth > 0) return NcclResult::success;
    const Group ended = std::exchange(group, {});
    if (ended.calls.empty()) return NcclResult::success;
    NcclComm* const comm = ended.comm;
    const Inside inside(*this, comm);
    enter(comm, "group_end");
    note_launch(*comm, ended.calls);
    // Only now, as with NCCL, whose own thread puts things on the stream.
    return begin(*comm, [this, comm, ended, launch = comm->launches++] {
      if (options_.launch_hangs) return false;
      put_on_stream(*comm, ended, launch);
      return true;
    });
  }
  NcclResult all_reduce(const void* send, void* recv, size_t count, DType dtype,
                        NcclReduction reduction, NcclComm* comm, CudaStream stream) override {
    if (count == options_.refused_count) return NcclResult::invalid_argument;
    return add({NcclCall::Kind::all_reduce, send, recv, count, dtype, reduction}, comm, stream);
  }
  NcclResult reduce(const void* send, void* recv, size_t count, DType dtype,
                    NcclReduction reduction, int root, NcclComm* comm, CudaStream stream) override {
    return add({NcclCall::Kind::reduce, send, recv, count, dtype, reduction, root}, comm, stream);
  }
  NcclResult reduce_scatter(const void* send, void* recv, size_t count, DType dtype,
                            NcclReduction reduction, NcclComm* comm, CudaStream stream) override {
    return add({NcclCall::Kind::reduce_scatter, send, recv, count, dtype, reduction}, comm, stream);
  }
  NcclResult all_gather(const void* send, void* recv, size_t count, DType dtype, NcclComm* comm,
                        CudaStream stream) override {
    return add({NcclCall::Kind::all_gather, send, recv, count, dtype}, comm, stream);
  }
  NcclResult broadcast(const void* send, void* recv, size_t count, DType dtype, int root,
                       NcclComm* comm, CudaStream stream) override {
    return add({NcclCall::Kind::broadcast, send, recv, count, dtype, {}, root}, comm, stream);
  }
  NcclResult send(const void* memory, size_t count, DType dtype, int peer, NcclComm* comm,
                  CudaStream stream) override {
    return add({NcclCall::Kind::send, memory, nullptr, count, dtype, {}, peer}, comm, stream);
  }
  NcclResult recv(void* memory, size_t count, DType dtype, int peer, NcclComm* comm,
                  CudaStream stream) override {
    return add({NcclCall::Kind::recv, nullptr, memory, count, dtype, {}, peer}, comm, stream);
  }

 private:
  // What a thread has begun.
  struct Group {
    int depth = 0;
    NcclComm* comm = nullptr;
    CudaStream stream;
    std::vector<NcclCall> calls;
  };
  static Group& group() {
    thread_local Group group;
    return group;
  }

  // A thread's time inside a call for a communicator, with the mutex for the rest of the call.
  class Inside {
   public:
    Inside(FakeNccl& nccl, NcclComm* comm)
        : nccl_(nccl), process_(comm->process), lock_(nccl.mutex_) {
      if (nccl.inside_[process_]++ > 0) nccl.violate("two threads inside");
      if (comm->ended || comm->aborted) nccl.violate("a call after the end");
      lock_.unlock();
      std::this_thread::sleep_for(std::chrono::duration<double>(nccl.options_.call_s));
      lock_.lock();
    }
    ~Inside() { --nccl_.inside_[process_]; }

   private:
    FakeNccl& nccl_;
    const int process_;
    std::unique_lock<std::mutex> lock_;
  };
  // For calls that a communicator takes only when it is not in progress; the mutex is held.
  void enter(NcclComm* comm, const char* call) {
    if (comm->progress) violate(std::string(call) + " while in progress");
    if (comm->error != NcclResult::success) violate(std::string(call) + " after an error");
  }
  void since(int version, const char* what) {
    if (options_.version < version) violate(std::string(what) + " is not in this version");
  }
  void violate(const std::string& what) { violations_.push_back(what); }

  NcclResult begin(NcclComm& comm, std::function<bool()> progress) {
    comm.polls_left = options_.polls;
    comm.progress = std::move(progress);
    if (comm.polls_left > 0 || !comm.progress()) return NcclResult::in_progress;
    comm.progress = nullptr;
    return NcclResult::success;
  }
  void end(NcclComm& comm) {
    if (comm.ended) violate("ended twice");
    comm.ended = true;
  }

  NcclResult add(NcclCall call, NcclComm* comm, CudaStream stream) {
    const Inside inside(*this, comm);
    enter(comm, "collective");
    Group& group = this->group();
    if (group.depth == 0) violate("a call outside a group");
    if (group.comm && (group.comm != comm || group.stream != stream)) violate("a mixed group");
    if (!call.in && !call.out) violate("a call without memory");
    const auto scaled = scales_.find(call.reduction);
    if (scaled != scales_.end()) {
      call.scale = scaled->second;
      call.reduction = NcclReduction::sum;
    }
    group.comm = comm;
    group.stream = stream;
    group.calls.push_back(call);
    return NcclResult::success;
  }

  // Every rank launches on the same communicators in the same order, or two wait for each other.
  void note_launch(NcclComm& comm, const std::vector<NcclCall>& calls) {
    for (const NcclCall& call : calls) {
      kinds_.push_back(call.kind);
      for (const NcclCall& other : calls) {
        if (call.kind != NcclCall::Kind::send || other.kind != NcclCall::Kind::recv) continue;
        const auto* sent = static_cast<const std::byte*>(call.in);
        const auto* received = static_cast<const std::byte*>(other.out);
        const auto bytes = static_cast<int64_t>(call.count) * itemsize(call.dtype);
        if (sent < received + bytes && received < sent + bytes)
          violate("receives into what it sends");
      }
    }
    // Those of some ranks only are others on other ranks.
    if (comm.world->size < static_cast<int>(devices_.size())) return;
    std::vector<int>& own = launched_[comm.process];
    own.push_back(comm.world->index);
    if (order_.size() < own.size()) order_.push_back(own.back());
    if (order_[own.size() - 1] != own.back()) {
      violate("rank " + std::to_string(comm.process) + " launches on communicator " +
              std::to_string(own.back()) + " where another rank used " +
              std::to_string(order_[own.size() - 1]));
    }
  }

  void put_on_stream(NcclComm& comm, const Group& group, int64_t launch) {
    std::shared_ptr<NcclWorld::Meeting>& meeting = comm.world->meetings[launch];
    if (!meeting) meeting = std::make_shared<NcclWorld::Meeting>();
    ++comm.on_device;
    const int op = ops_[comm.process]++;
    devices_[static_cast<size_t>(comm.process)]->run(
        group.stream, op, [this, &comm, group, op, launch, meeting = meeting] {
          const bool fails = options_.fails_on == comm.process && options_.fails_at == op;
          meet(comm, group.calls, fails || launch >= options_.hangs_from, fails, *meeting);
        });
  }

  void meet(NcclComm& comm, const std::vector<NcclCall>& calls, bool hangs, bool fails,
            NcclWorld::Meeting& meeting);
  const std::vector<TracedCuda*> devices_;  // by process
  const FakeNcclOptions options_;
  const std::string path_ = "fake";

  mutable std::mutex mutex_;  // guards what is below
  mutable std::condition_variable changed_;
  int64_t next_id_ = 1;
  int next_reduction_ = 5;
  std::map<int64_t, NcclWorld> worlds_;
  std::vector<std::unique_ptr<NcclComm>> comms_;
  std::vector<std::unique_ptr<NcclWindow>> windows_;
  std::map<NcclReduction, double> scales_;
  std::map<void*, std::unique_ptr<std::byte[]>> memory_;
  std::map<int, std::vector<int>> launched_;  // by process: communicators
  std::vector<int> order_;                    // the longest of those
  std::map<int, int> ops_;                    // by process
  std::map<int, int> inside_;                 // threads, by process
  std::vector<NcclConfig> configs_;
  std::vector<NcclCall::Kind> kinds_;
  int64_t begun_ = 0, windows_made_ = 0, buffers_registered_ = 0;
  std::vector<std::string> violations_;
};

}  // namespace usbyte::test

/// One launch of all ranks.
struct usbyte::NcclWorld::Meeting {
  std::map<int, std::vector<usbyte::test::NcclCall>> ranks;
  bool hangs = false;
  bool over = false;
};

namespace usbyte::test {

inline void FakeNccl::meet(NcclComm& comm, const std::vector<NcclCall>& calls, bool hangs,
                           bool fails, NcclWorld::Meeting& meeting) {
  std::unique_lock lock(mutex_);
  ++begun_;
  meeting.hangs |= hangs;
  if (fails) comm.error = NcclResult::remote_error;
  meeting.ranks.emplace(comm.rank, calls);
  if (static_cast<int>(meeting.ranks.size()) == comm.world->size && !meeting.hangs) {
    for (const auto& [rank, its] : meeting.ranks) {
      const std::string what = difference(its, meeting.ranks.begin()->second);
      if (!what.empty()) violate(what);
    }
    move_data(meeting.ranks);
    meeting.over = true;
  }
  changed_.notify_all();
  changed_.wait(lock, [&] { return meeting.over || comm.aborted; });
  if (!meeting.over) meeting.ranks.erase(comm.rank);  // its memory may be gone when others come
  --comm.on_device;
  changed_.notify_all();
}

}  // namespace usbyte::test
