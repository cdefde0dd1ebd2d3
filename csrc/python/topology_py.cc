#include "usbyte/topology.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_topology(py::module_& m) {
  py::class_<Dimension>(m, "Dimension",
                        "One dimension of a network: links among ranks that differ in one "
                        "coordinate. bytes_per_s: that a rank can send, and at the same time "
                        "receive; latency_s: of one step; kind: ring, fully_connected or switched.")
      .def(py::init([](std::string name, int size, double bytes_per_s, double latency_s,
                       const std::string& kind, bool in_network_reduction) {
             return Dimension{
                 std::move(name),     size, bytes_per_s, latency_s, dimension_kind_from_name(kind),
                 in_network_reduction};
           }),
           py::arg("name"), py::arg("size"), py::arg("bytes_per_s"), py::arg("latency_s") = 0.0,
           py::arg("kind") = "ring", py::arg("in_network_reduction") = false)
      .def_readonly("name", &Dimension::name)
      .def_readonly("size", &Dimension::size)
      .def_readonly("bytes_per_s", &Dimension::bytes_per_s)
      .def_readonly("latency_s", &Dimension::latency_s)
      .def_property_readonly("kind", [](const Dimension& d) { return std::string(name(d.kind)); })
      .def_readonly("in_network_reduction", &Dimension::in_network_reduction)
      .def_property_readonly("steps", &Dimension::steps)
      .def_property_readonly("startup_s", &Dimension::startup_s)
      .def("moved_bytes", &Dimension::moved_bytes, py::arg("bytes"), py::arg("of_all_reduce"),
           "Bytes that a rank sends in a phase whose vector has `bytes` where it is whole.")
      .def("exchanged_bytes", &Dimension::exchanged_bytes, py::arg("bytes"),
           "Bytes that a rank sends in an all_to_all of `bytes`; around a ring they are passed on.")
      .def("__eq__", &Dimension::operator==);
  py::class_<Topology>(m, "Topology",
                       "A network of several dimensions, the innermost first; "
                       "rank = c0 + c1 * P0 + c2 * P0 * P1 + ...")
      .def(py::init([](std::vector<Dimension> dimensions) {
             Topology topology{std::move(dimensions)};
             topology.validate();
             return topology;
           }),
           py::arg("dimensions"))
      .def_readonly("dimensions", &Topology::dimensions)
      .def_property_readonly("ranks", &Topology::ranks)
      .def_property_readonly("bytes_per_s", &Topology::bytes_per_s)
      .def("coordinates", &Topology::coordinates, py::arg("rank"))
      .def("rank", &Topology::rank, py::arg("coordinates"))
      .def("line", &Topology::line, py::arg("rank"), py::arg("dimension"))
      .def("among", &Topology::among, py::arg("sizes"),
           "As a collective among sizes[d] ranks of each line sees it.")
      .def("to_json", &Topology::to_json)
      .def_static("from_json", &Topology::from_json, py::arg("json"))
      .def("__eq__", &Topology::operator==);
  py::class_<MeshPhase>(m, "MeshPhase", "One phase of a chunk; see topology.h.")
      .def_readonly("dimension", &MeshPhase::dimension)
      .def_property_readonly("kind", [](const MeshPhase& p) { return std::string(name(p.kind)); })
      .def_readonly("bytes", &MeshPhase::bytes)
      .def_readonly("moved_bytes", &MeshPhase::moved_bytes)
      .def_readonly("startup_s", &MeshPhase::startup_s)
      .def_readonly("transfer_s", &MeshPhase::transfer_s)
      .def_property_readonly("seconds", &MeshPhase::seconds);
  m.def(
      "mesh_phases",
      [](const Topology& topology, const std::string& kind, const Route& route, double bytes) {
        return mesh_phases(topology, collective_from_name(kind), route, bytes);
      },
      py::arg("topology"), py::arg("kind"), py::arg("route"), py::arg("bytes"),
      "Phases of a chunk, in the order in which it walks them.");
}

}  // namespace usbyte
