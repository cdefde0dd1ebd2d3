// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "comm/local_communicator.h"
#include "comm/mesh_communicator.h"
#include "cuda/communicators/staged_communicator.h"
#include "cuda/communicators/stream_mesh_communicator.h"
#include "usbyte/communicator.h"
#include "usbyte/error.h"

namespace py = pybind11;

namespace usbyte {

namespace {

/// Hands launches to a Python callable, which starts them on a torch.distributed backend and
/// reports each one's end by `complete(ticket, error)`, which may launch what comes next.
class PythonCommunicator : public Communicator {
 public:
  PythonCommunicator(int rank, int size, py::function launch)
      : rank_(rank), size_(size), launch_(std::move(launch)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void launch(const Request& request, Completion done) override {
    if (request.scale != 1) {
      const UsageError error("torch.distributed does not scale what it sums; do so first");
      return done(std::make_exception_ptr(error));
    }
    uint64_t ticket;
    {
      std::lock_guard lock(mutex_);
      ticket = next_ticket_++;
      pending_.emplace(ticket, std::move(done));
    }
    std::string error;
    {
      py::gil_scoped_acquire gil;
      try {
        py::list spans;
        for (const BufferView& s : request.recv) {
          spans.append(py::make_tuple(reinterpret_cast<uintptr_t>(s.data), s.count));
        }
        launch_(ticket, std::string(name(request.kind)), std::string(name(request.dtype)),
                std::move(spans));
        return;
      } catch (py::error_already_set& e) {
        error = e.what();
      }
    }
    complete(ticket, error);
  }

  void complete(uint64_t ticket, const std::optional<std::string>& error) {
    Completion done;
    {
      std::lock_guard lock(mutex_);
      auto it = pending_.find(ticket);
      if (it == pending_.end()) throw UsageError("complete: this ticket is not in flight");
      done = std::move(it->second);
      pending_.erase(it);
    }
    done(error ? std::make_exception_ptr(FaultError(*error)) : nullptr);
  }

 private:
  const int rank_;
  const int size_;
  py::function launch_;
  std::mutex mutex_;  // guards the two below
  uint64_t next_ticket_ = 0;
  std::unordered_map<uint64_t, Completion> pending_;
};

}  // namespace

void register_communicator(py::module_& m) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size);
  py::class_<PythonCommunicator, Communicator, std::shared_ptr<PythonCommunicator>>(
      m, "PythonCommunicator",
      "Calls launch(ticket, kind, dtype, [(address, count), ...]); report back with complete().")
      .def(py::init<int, int, py::function>(), py::arg("rank"), py::arg("size"), py::arg("launch"))
      .def("complete", &PythonCommunicator::complete, py::arg("ticket"),
           py::arg("error") = std::nullopt);
  py::class_<StagedCommunicator, Communicator, std::shared_ptr<StagedCommunicator>>(
      m, "StagedCommunicator", "Collectives on device memory over a communicator of the host.")
      .def(py::init([](std::shared_ptr<Cuda> cuda, std::shared_ptr<Communicator> inner,
                       int64_t chunk_bytes, int buffers) {
             auto held = end_locked(std::move(inner));
             py::gil_scoped_release free;
             return end_unlocked(std::make_shared<StagedCommunicator>(
                 std::move(cuda), std::move(held), StagedOptions{chunk_bytes, buffers}));
           }),
           py::arg("cuda").none(false), py::arg("inner").none(false), py::kw_only(),
           py::arg("chunk_bytes") = StagedOptions{}.chunk_bytes,
           py::arg("buffers") = StagedOptions{}.buffers);
  m.def(
      "make_local_communicators",
      [](int size, AlphaBeta cost) {
        std::vector<std::shared_ptr<Communicator>> out;
        for (auto& c : make_local_communicators(size, cost)) out.push_back(std::move(c));
        return out;
      },
      py::arg("size"), py::arg("cost") = AlphaBeta{},
      "Ranks as threads of this process, for tests and benchmarks.");
}

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

using Groups = std::vector<std::shared_ptr<Communicator>>;

// What Python owns may be let go of by any thread.
Groups owned(Groups communicators) {
  for (auto& communicator : communicators) {
    if (communicator) communicator = end_locked(std::move(communicator));
  }
  return communicators;
}

std::shared_ptr<MeshCommunicator> make_mesh(Topology topology, std::shared_ptr<Communicator> flat,
                                            Groups axis_groups) {
  flat = end_locked(std::move(flat));
  axis_groups = owned(std::move(axis_groups));
  py::gil_scoped_release free;
  return end_unlocked(std::make_shared<MeshCommunicator>(std::move(topology), std::move(flat),
                                                         std::move(axis_groups)));
}

std::shared_ptr<StreamMeshCommunicator> make_stream_mesh(Topology topology,
                                                         std::shared_ptr<Cuda> cuda,
                                                         std::shared_ptr<Communicator> flat,
                                                         Groups axis_groups, int slots) {
  flat = end_locked(std::move(flat));
  axis_groups = owned(std::move(axis_groups));
  py::gil_scoped_release free;
  return end_unlocked(std::make_shared<StreamMeshCommunicator>(
      std::move(topology), std::move(cuda), std::move(flat), std::move(axis_groups), slots));
}

void all_reduce(MeshCommunicator& communicator,
                const std::vector<std::pair<uintptr_t, int64_t>>& spans, const std::string& dtype,
                const MeshSchedule* schedule) {
  Request request;
  request.kind = Collective::all_reduce;
  request.dtype = dtype_from_name(dtype);
  for (auto [address, count] : spans) {
    request.recv.push_back({reinterpret_cast<void*>(address), count});
  }
  if (schedule) request.schedule = std::make_shared<MeshSchedule>(*schedule);
  py::gil_scoped_release free;
  communicator.run(request);
}

}  // namespace

void register_mesh_communicator(py::module_& m) {
  py::class_<MeshCommunicator, Communicator, std::shared_ptr<MeshCommunicator>>(
      m, "MeshCommunicator",
      "All_reduces with a schedule over the axis_groups of a network's dimensions, each a "
      "communicator "
      "of the host or None where there is one rank; everything else over the flat one.")
      .def(py::init(&make_mesh), py::arg("topology"), py::arg("flat").none(false),
           py::arg("axis_groups"))
      .def("all_reduce", &all_reduce, py::arg("spans"), py::arg("dtype") = "float32",
           py::arg("schedule") = nullptr,
           "Sums [(address, count), ...] in place; returns when that is over.")
      .def("failure", &MeshCommunicator::failure, Unlocked(), "Empty while all is well.")
      .def("abort", &MeshCommunicator::abort, Unlocked());
  py::class_<StreamMeshCommunicator, Communicator, std::shared_ptr<StreamMeshCommunicator>>(
      m, "StreamMeshCommunicator",
      "As MeshCommunicator, over communicators of a device: all phases are launched at once, and "
      "ordered there. At most `slots` operations run side by side.")
      .def(py::init(&make_stream_mesh), py::arg("topology"), py::arg("cuda"),
           py::arg("flat").none(false), py::arg("axis_groups"), py::arg("slots"))
      .def("set_speeds", &StreamMeshCommunicator::set_speeds, py::arg("measured"), Unlocked(),
           "For launches from now on; all ranks together, between requests.")
      .def("failure", &StreamMeshCommunicator::failure, Unlocked(), "Empty while all is well.")
      .def("abort", &StreamMeshCommunicator::abort, Unlocked());
}

}  // namespace usbyte
