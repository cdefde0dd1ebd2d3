#include "usbyte/codec_costs.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_codec_costs(py::module_& m) {
  py::class_<CodecCost>(m, "CodecCost",
                        "What a codec costs by bytes of float32 gradients: encoding, and decoding "
                        "a message, of an op one by one or all at once.")
      .def(py::init<AlphaBeta, AlphaBeta, bool, double>(), py::arg("encode") = AlphaBeta{},
           py::arg("decode") = AlphaBeta{}, py::arg("at_once") = false,
           py::arg("further_s_per_byte") = 0.0)
      .def_readonly("encode", &CodecCost::encode)
      .def_readonly("decode", &CodecCost::decode)
      .def_readonly("at_once", &CodecCost::at_once)
      .def_readonly("further_s_per_byte", &CodecCost::further_s_per_byte)
      .def("__eq__", &CodecCost::operator==);
  py::class_<CodecCosts>(m, "CodecCosts", "The costs of codecs on one machine, by spec.")
      .def(py::init([](const std::map<std::string, CodecCost>& by_spec, double row_s) {
             CodecCosts costs{{}, row_s};
             costs.by_spec.insert(by_spec.begin(), by_spec.end());
             return CodecCosts::from_json(costs.to_json());
           }),
           py::arg("by_spec") = std::map<std::string, CodecCost>{}, py::arg("row_s") = 0.0)
      .def_readonly("row_s", &CodecCosts::row_s)
      .def_property_readonly("specs",
                             [](const CodecCosts& costs) {
                               std::vector<std::string> out;
                               for (const auto& [spec, unused] : costs.by_spec) out.push_back(spec);
                               return out;
                             })
      .def("of", &CodecCosts::of, py::arg("spec"), "Of a spec; \"none\" is free.")
      .def("to_json", &CodecCosts::to_json)
      .def_static("from_json", &CodecCosts::from_json, py::arg("json"))
      .def("__eq__", &CodecCosts::operator==);
}

}  // namespace usbyte
