#include "policy/transforms/routing.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "plan/lines.h"

namespace py = pybind11;

namespace usbyte {

void register_routes(py::module_& m) {
  m.def("best_route", &best_route, py::arg("topology"), py::arg("bytes"),
        "The fastest of route_choices for an all_reduce, over several numbers of chunks.");
  m.def("fixed_route", &fixed_route, py::arg("topology"), py::arg("bytes"),
        "The fastest with the innermost dimension first for every chunk.");
  m.def("with_routes", &with_routes, py::arg("plan"), py::arg("network"),
        "The same plan with routes for all_reduces that are predicted to gain by them.");
  py::class_<LineWay>(m, "LineWay", "How an all_reduce goes along lines; see lines.h.")
      .def(py::init([](int sum_line, std::string scatter, std::string sum, std::string gather) {
             return LineWay{sum_line, std::move(scatter), std::move(sum), std::move(gather)};
           }),
           py::arg("sum_line"), py::arg("scatter") = "none", py::arg("sum") = "none",
           py::arg("gather") = "none")
      .def_readonly("sum_line", &LineWay::sum_line)
      .def_readonly("scatter", &LineWay::scatter)
      .def_readonly("sum", &LineWay::sum)
      .def_readonly("gather", &LineWay::gather);
  m.def("line_ways", &line_ways, py::arg("op"), py::arg("mesh"),
        "Ways along lines that an op may go; see routing.h.");
  m.def(
      "along_lines",
      [](const Plan& plan, const Topology& mesh, const std::vector<std::optional<LineWay>>& ways) {
        return along_lines(plan, mesh, ways);
      },
      py::arg("plan"), py::arg("mesh"), py::arg("ways"),
      "The same plan where ops, in order, go these ways; see lines.h.");
  m.def("line_codecs", &line_codecs, py::arg("codec"), py::arg("mesh"),
        "Specs of codecs that ops with this one may have on ways along lines.");
  m.def(
      "with_lines",
      [](const Plan& plan, const Profile& profile, const NetworkModel& network,
         const std::string& overlap, const CodecCosts& costs) {
        return with_lines(plan, profile, network, overlap_from_name(overlap), costs);
      },
      py::arg("plan"), py::arg("profile"), py::arg("network"), py::arg("overlap"), py::arg("costs"),
      py::call_guard<py::gil_scoped_release>(),
      "The same plan where each op with a codec goes along lines, by codecs in one dimension or "
      "both, if that is predicted to be faster; see routing.h.");
  m.def("routed_network", &routed_network, py::arg("network"),
        "What the network costs whose all_reduces are all routed.");
}

}  // namespace usbyte
