// SPDX-License-Identifier: Apache-2.0
#include "usbyte/simulator.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_simulator(py::module_& m) {
  py::class_<Prediction>(m, "Prediction", "An iteration as predicted; seconds.")
      .def_readonly("step_s", &Prediction::step_s)
      .def_readonly("arrived_s", &Prediction::arrived_s)
      .def_property_readonly("launched_s", [](const Prediction& p) { return p.record.launched_s; })
      .def_property_readonly("done_s", [](const Prediction& p) { return p.record.done_s; })
      .def_property_readonly("waits", [](const Prediction& p) { return p.record.waits; })
      .def_property_readonly("updates", [](const Prediction& p) { return p.record.updates; });
  m.def(
      "simulate",
      [](const Plan& plan, const Profile& profile, const NetworkModel& network,
         const std::string& overlap, bool sharded, const CodecCosts& codec_costs) {
        return Simulator(profile, network, overlap_from_name(overlap), sharded, codec_costs)
            .predict(plan);
      },
      py::arg("plan"), py::arg("profile"), py::arg("network"), py::arg("overlap") = "forward",
      py::arg("sharded") = false, py::arg("codec_costs") = CodecCosts{},
      py::call_guard<py::gil_scoped_release>(), "Without any codec_costs, coding takes no time.");
  m.def(
      "bytes_bound_s",
      [](const Profile& profile, const NetworkModel& network, const std::string& overlap,
         bool sharded) {
        return Simulator(profile, network, overlap_from_name(overlap), sharded).bytes_bound_s();
      },
      py::arg("profile"), py::arg("network"), py::arg("overlap") = "forward",
      py::arg("sharded") = false,
      "Least seconds of a step that bytes allow, whatever the plan, without codecs.");
  m.def(
      "bound_s",
      [](const Profile& profile, const NetworkModel& network, const std::string& overlap,
         bool sharded) {
        return Simulator(profile, network, overlap_from_name(overlap), sharded).bound_s();
      },
      py::arg("profile"), py::arg("network"), py::arg("overlap") = "forward",
      py::arg("sharded") = false,
      "Least seconds of a step that bytes and startups allow, at least bytes_bound_s.");
}

}  // namespace usbyte
