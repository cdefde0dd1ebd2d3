#include "engine/coding/codec_probe.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_codec_probe(py::module_& m) {
  py::class_<MeasuredCodec>(m, "MeasuredCodec",
                            "What a codec was measured to cost one thread, or a device.")
      .def_readonly("spec", &MeasuredCodec::spec)
      .def_readonly("cost", &MeasuredCodec::cost)
      .def_readonly("encode_residual", &MeasuredCodec::encode_residual,
                    "Median over sizes of the fit's relative error.")
      .def_readonly("decode_residual", &MeasuredCodec::decode_residual)
      .def_readonly("largest_bytes", &MeasuredCodec::largest_bytes,
                    "Gradients of the largest sample.")
      .def_readonly("message_bytes", &MeasuredCodec::message_bytes, "Of their message.");
  m.def("measure_codec", &measure_codec, py::arg("spec"), py::arg("budget_s"),
        py::arg("device").none(true) = nullptr, py::call_guard<py::gil_scoped_release>(),
        "Measures a codec on this thread, or of gradients on a device, for about that many "
        "seconds.");
}

}  // namespace usbyte
