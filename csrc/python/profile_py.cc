#include "usbyte/profile.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_profile(py::module_& m) {
  using Times = std::vector<double>;
  py::class_<Profile>(m, "Profile",
                      "Measured iteration: tensors in forward order, need_s and ready_s in seconds "
                      "since the forward pass began.")
      .def(py::init([](std::vector<TensorSpec> tensors, Times need_s, Times ready_s, double step_s,
                       double update_s, std::string model, Times need_spread_s,
                       Times ready_spread_s) {
             Profile p{std::move(tensors),
                       std::move(need_s),
                       std::move(ready_s),
                       step_s,
                       update_s,
                       std::move(model),
                       std::move(need_spread_s),
                       std::move(ready_spread_s)};
             p.validate();
             return p;
           }),
           py::arg("tensors"), py::arg("need_s"), py::arg("ready_s"), py::arg("step_s") = 0.0,
           py::arg("update_s") = 0.0, py::arg("model") = "", py::arg("need_spread_s") = Times{},
           py::arg("ready_spread_s") = Times{})
      .def_readonly("tensors", &Profile::tensors)
      .def_readonly("need_s", &Profile::need_s)
      .def_readonly("ready_s", &Profile::ready_s)
      .def_readonly("step_s", &Profile::step_s)
      .def_readonly("update_s", &Profile::update_s)
      .def_readonly("model", &Profile::model)
      .def_readonly("need_spread_s", &Profile::need_spread_s)
      .def_readonly("ready_spread_s", &Profile::ready_spread_s)
      .def_property_readonly("backward_end_s", &Profile::backward_end_s)
      .def_property_readonly("iteration_s", &Profile::iteration_s)
      .def_property_readonly("bytes", &Profile::bytes)
      .def("to_json", &Profile::to_json)
      .def_static("from_json", &Profile::from_json, py::arg("json"));
  m.def(
      "due_times",
      [](const Profile& profile, const std::string& overlap) {
        return due_times(profile, overlap_from_name(overlap));
      },
      py::arg("profile"), py::arg("overlap"),
      "By tensor, the latest arrival that delays nothing, seconds since the forward pass began.");
}

}  // namespace usbyte
