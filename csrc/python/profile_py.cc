#include "usbyte/profile.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_profile(py::module_& m) {
  py::class_<Profile>(m, "Profile",
                      "Measured iteration: tensors in forward order, need_s and ready_s in seconds "
                      "since the forward pass began.")
      .def(py::init([](std::vector<TensorSpec> tensors, std::vector<double> need_s,
                       std::vector<double> ready_s, double step_s) {
             Profile p{std::move(tensors), std::move(need_s), std::move(ready_s), step_s};
             p.validate();
             return p;
           }),
           py::arg("tensors"), py::arg("need_s"), py::arg("ready_s"), py::arg("step_s") = 0.0)
      .def_readonly("tensors", &Profile::tensors)
      .def_readonly("need_s", &Profile::need_s)
      .def_readonly("ready_s", &Profile::ready_s)
      .def_readonly("step_s", &Profile::step_s)
      .def("to_json", &Profile::to_json)
      .def_static("from_json", &Profile::from_json, py::arg("json"));
}

}  // namespace usbyte
