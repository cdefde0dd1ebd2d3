#include "usbyte/mesh_communicator.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "usbyte/stream_mesh_communicator.h"

namespace py = pybind11;

namespace usbyte {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

using Lines = std::vector<std::shared_ptr<Communicator>>;

// What Python owns may be let go of by any thread.
Lines owned(Lines communicators) {
  for (auto& communicator : communicators) {
    if (communicator) communicator = end_locked(std::move(communicator));
  }
  return communicators;
}

std::shared_ptr<MeshCommunicator> make_mesh(Topology topology, std::shared_ptr<Communicator> flat,
                                            Lines lines) {
  flat = end_locked(std::move(flat));
  lines = owned(std::move(lines));
  py::gil_scoped_release free;
  return end_unlocked(
      std::make_shared<MeshCommunicator>(std::move(topology), std::move(flat), std::move(lines)));
}

std::shared_ptr<StreamMeshCommunicator> make_stream_mesh(Topology topology,
                                                         std::shared_ptr<Cuda> cuda,
                                                         std::shared_ptr<Communicator> flat,
                                                         Lines lines, int slots) {
  flat = end_locked(std::move(flat));
  lines = owned(std::move(lines));
  py::gil_scoped_release free;
  return end_unlocked(std::make_shared<StreamMeshCommunicator>(
      std::move(topology), std::move(cuda), std::move(flat), std::move(lines), slots));
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
      "All_reduces with a schedule over the lines of a network's dimensions, each a communicator "
      "of the host or None where there is one rank; everything else over the flat one.")
      .def(py::init(&make_mesh), py::arg("topology"), py::arg("flat").none(false), py::arg("lines"))
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
           py::arg("flat").none(false), py::arg("lines"), py::arg("slots"))
      .def("set_speeds", &StreamMeshCommunicator::set_speeds, py::arg("measured"), Unlocked(),
           "For launches from now on; all ranks together, between requests.")
      .def("failure", &StreamMeshCommunicator::failure, Unlocked(), "Empty while all is well.")
      .def("abort", &StreamMeshCommunicator::abort, Unlocked());
}

}  // namespace usbyte
