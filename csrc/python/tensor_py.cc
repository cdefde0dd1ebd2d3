#include "usbyte/tensor.h"

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_tensor(py::module_& m) {
  py::class_<TensorSpec>(m, "TensorSpec", "One gradient on the line; numel and offset in elements.")
      .def(py::init([](std::string name, int64_t numel, const std::string& dtype, int64_t offset,
                       int64_t rows, int64_t width) {
             return TensorSpec{std::move(name), numel, dtype_from_name(dtype), offset, rows, width};
           }),
           py::arg("name"), py::arg("numel"), py::arg("dtype") = "float32", py::arg("offset") = 0,
           py::arg("rows") = 1, py::arg("width") = 0)
      .def_readonly("name", &TensorSpec::name)
      .def_readonly("numel", &TensorSpec::numel)
      .def_readonly("offset", &TensorSpec::offset)
      .def_readonly("rows", &TensorSpec::rows)
      .def_readonly("width", &TensorSpec::width)
      .def_property_readonly("sparse", &TensorSpec::sparse)
      .def_property_readonly("dtype",
                             [](const TensorSpec& t) { return std::string(name(t.dtype)); })
      .def_property_readonly("end", &TensorSpec::end)
      .def("__eq__", &TensorSpec::operator==)
      .def("__repr__", [](const TensorSpec& t) {
        return "TensorSpec(" + t.name + ", " + std::to_string(t.numel) + " x " +
               std::string(name(t.dtype)) + " at " + std::to_string(t.offset) + ")";
      });
}

}  // namespace usbyte
