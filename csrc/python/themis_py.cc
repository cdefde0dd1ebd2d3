#include "topology/themis.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_themis(py::module_& m) {
  const ThemisOptions usual;
  const std::string latency(name(usual.latency));
  py::class_<TwoDimensionShare>(m, "TwoDimensionShare", "Of two dimensions, without startups.")
      .def_readonly("inner_first", &TwoDimensionShare::inner_first)
      .def_readonly("gains", &TwoDimensionShare::gains)
      .def_readonly("gain", &TwoDimensionShare::gain);
  py::class_<MeshChoice>(m, "MeshChoice", "A way to carry out a collective; seconds.")
      .def_readonly("name", &MeshChoice::name)
      .def_readonly("schedule", &MeshChoice::schedule)
      .def_readonly("seconds", &MeshChoice::seconds)
      .def_readonly("fixed_s", &MeshChoice::fixed_s)
      .def_readonly("ideal_s", &MeshChoice::ideal_s);
  m.def("fixed_routes", &fixed_routes, py::arg("topology"), py::arg("chunks"),
        "Innermost dimension first for all chunks.");
  m.def(
      "themis_routes",
      [](const Topology& topology, const std::string& kind, double bytes, int chunks,
         const std::string& counted, double threshold_divisor) {
        return themis_routes(topology, collective_from_name(kind), bytes, chunks,
                             {themis_latency_from_name(counted), threshold_divisor});
      },
      py::arg("topology"), py::arg("kind"), py::arg("bytes"), py::arg("chunks"),
      py::arg("latency") = latency, py::arg("threshold_divisor") = usual.threshold_divisor,
      "Routes by Themis' greedy rule. latency: each_phase, once or original (none).");
  m.def(
      "route_loads_s",
      [](const Topology& topology, const std::string& kind, double bytes,
         const std::vector<Route>& routes, const std::string& counted) {
        return route_loads_s(topology, collective_from_name(kind), bytes, routes,
                             {themis_latency_from_name(counted)});
      },
      py::arg("topology"), py::arg("kind"), py::arg("bytes"), py::arg("routes"),
      py::arg("latency") = latency, "Seconds of reduce_scatter phases, by dimension.");
  m.def("two_dimension_share", &two_dimension_share, py::arg("topology"),
        "The best share of bytes that goes through the inner dimension first.");
  m.def(
      "chosen_routes",
      [](const Topology& topology, const std::string& kind, double bytes, int chunks,
         const std::string& counted, double threshold_divisor, bool startups_overlap) {
        return chosen_routes(topology, collective_from_name(kind), bytes, chunks,
                             {themis_latency_from_name(counted), threshold_divisor},
                             {MeshQueue::fifo, startups_overlap});
      },
      py::arg("topology"), py::arg("kind"), py::arg("bytes"), py::arg("chunks"),
      py::arg("latency") = latency, py::arg("threshold_divisor") = usual.threshold_divisor,
      py::arg("startups_overlap") = false,
      "The fastest of the fixed order, Themis with fifo, and with the smallest chunk first.");
}

}  // namespace usbyte
