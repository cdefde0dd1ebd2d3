#include "policy/transforms/adatopk.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_adatopk(py::module_& m) {
  m.def(
      "adatopk_ratios",
      [](const std::vector<double>& predicted_s, double least_ratio, double most_ratio) {
        return adatopk_ratios(predicted_s, least_ratio, most_ratio);
      },
      py::arg("predicted_s"), py::arg("least_ratio"), py::arg("most_ratio") = 1.0,
      "Shares to keep by link or tensor, smallest where sending takes longest (FusionLLM).");
  m.def(
      "adatopk_codecs",
      [](const std::vector<double>& predicted_s, double least_ratio, double most_ratio) {
        return adatopk_codecs(predicted_s, least_ratio, most_ratio);
      },
      py::arg("predicted_s"), py::arg("least_ratio"), py::arg("most_ratio") = 1.0,
      "The same as codecs: 'topk:RATIO', or 'none' where that does not pay.");
}

}  // namespace usbyte
