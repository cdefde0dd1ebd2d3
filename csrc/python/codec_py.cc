#include "usbyte/codec.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_codec(py::module_& m) {
  py::class_<Codec, std::shared_ptr<Codec>>(m, "Codec", "Makes gradients smaller; see codec.h.")
      .def_property_readonly("spec", &Codec::spec)
      .def_property_readonly("adds", &Codec::adds)
      .def_property_readonly("memories", &Codec::memories)
      .def_property_readonly("remembers", &Codec::remembers)
      .def_property_readonly("relays", &Codec::relays)
      .def_property_readonly("factors", [](const Codec& c) { return c.matrices() != nullptr; })
      .def("at_step", &Codec::at_step, py::arg("step"))
      .def("message_bytes", &Codec::message_bytes, py::arg("count"));
  m.def(
      "make_codec",
      [](const std::string& spec) { return std::const_pointer_cast<Codec>(make_codec(spec)); },
      py::arg("spec"), "The codec that a spec names; None for \"none\".");
  m.def("codec_names", &codec_names, "Names that make_codec knows, without \"none\".");
}

}  // namespace usbyte
