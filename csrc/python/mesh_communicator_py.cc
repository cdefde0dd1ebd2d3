#include "usbyte/mesh_communicator.h"

#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_mesh_communicator(py::module_& m) {
  using Held = std::shared_ptr<Communicator>;
  py::class_<MeshCommunicator, Communicator, std::shared_ptr<MeshCommunicator>>(
      m, "MeshCommunicator",
      "All_reduces with routes over the lines of a mesh, by dimension, None where there is no "
      "other rank; all else over the flat communicator.")
      .def(py::init([](Topology topology, Held flat, const std::vector<Held>& lines) {
             Held all = end_locked(std::move(flat));
             std::vector<Held> held;
             for (const Held& line : lines) held.push_back(line ? end_locked(line) : nullptr);
             py::gil_scoped_release free;
             return end_unlocked(std::make_shared<MeshCommunicator>(
                 std::move(topology), std::move(all), std::move(held)));
           }),
           py::arg("topology"), py::arg("flat").none(false), py::arg("lines"));
}

}  // namespace usbyte
