#include "usbyte/routes.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "usbyte/lines.h"

namespace py = pybind11;

namespace usbyte {

void register_routes(py::module_& m) {
  m.def("best_route", &best_route, py::arg("topology"), py::arg("bytes"),
        "The fastest of route_choices for an all_reduce, over several numbers of chunks.");
  m.def("fixed_route", &fixed_route, py::arg("topology"), py::arg("bytes"),
        "The fastest with the innermost dimension first for every chunk.");
  m.def("with_routes", &with_routes, py::arg("plan"), py::arg("network"),
        "The same plan with routes for all_reduces that are predicted to gain by them.");
  m.def("along_lines", &along_lines, py::arg("plan"), py::arg("mesh"), py::arg("coded"),
        "The same plan with codecs in one of two dimensions only.");
  m.def("routed_network", &routed_network, py::arg("network"),
        "What the network costs whose all_reduces are all routed.");
}

}  // namespace usbyte
