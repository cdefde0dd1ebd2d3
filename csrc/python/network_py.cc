#include "usbyte/network.h"

#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_network(py::module_& m) {
  py::class_<AlphaBeta>(m, "AlphaBeta", "Cost of one op of m bytes: alpha_s + beta_s_per_byte * m.")
      .def(py::init<double, double>(), py::arg("alpha_s") = 0.0, py::arg("beta_s_per_byte") = 0.0)
      .def_readonly("alpha_s", &AlphaBeta::alpha_s)
      .def_readonly("beta_s_per_byte", &AlphaBeta::beta_s_per_byte)
      .def("time_s", &AlphaBeta::time_s, py::arg("bytes"))
      .def("__repr__", [](const AlphaBeta& c) {
        return "AlphaBeta(alpha_s=" + std::to_string(c.alpha_s) +
               ", ns_per_byte=" + std::to_string(c.beta_s_per_byte * 1e9) + ")";
      });
  py::class_<NetworkModel>(m, "NetworkModel", "What the network costs, on the path of training.")
      .def(py::init<int, AlphaBeta>(), py::arg("ranks"), py::arg("all_reduce"))
      .def_readonly("ranks", &NetworkModel::ranks)
      .def_readonly("all_reduce", &NetworkModel::all_reduce);
  m.def(
      "fit_alpha_beta",
      [](const std::vector<std::pair<int64_t, double>>& samples) {
        std::vector<Sample> rows;
        for (auto [bytes, seconds] : samples) rows.push_back({bytes, seconds});
        return fit_alpha_beta(rows);
      },
      py::arg("samples"), "Line through (bytes, seconds) pairs, alpha and beta not negative.");
}

}  // namespace usbyte
