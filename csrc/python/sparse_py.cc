#include "usbyte/sparse.h"

#include <string>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_sparse(py::module_& m) {
  py::class_<SparseTraffic>(m, "SparseTraffic", "What one rank has sent and received in a sum.")
      .def_readonly("sent_bytes", &SparseTraffic::sent_bytes)
      .def_readonly("received_bytes", &SparseTraffic::received_bytes)
      .def_readonly("push_imbalance", &SparseTraffic::push_imbalance)
      .def_readonly("pull_imbalance", &SparseTraffic::pull_imbalance);
  m.def(
      "sparse_schemes",
      [] {
        py::list out;
        for (const SparseScheme& s : sparse_schemes()) out.append(std::string(s.name));
        return out;
      },
      "Names of the ways to add up sparse gradients.");
}

}  // namespace usbyte
