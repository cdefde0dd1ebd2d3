#include <pybind11/pybind11.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace usbyte

PYBIND11_MODULE(_core, m) {
  m.doc() = "usbyte's C++ core; use it through usbyte and usbyte.torch.";
  usbyte::register_error(m);
  usbyte::register_tensor(m);
  usbyte::register_codec(m);
  usbyte::register_coded_op(m);
  usbyte::register_topology(m);
  usbyte::register_mesh_simulator(m);
  usbyte::register_themis(m);
  usbyte::register_plan(m);
  usbyte::register_profile(m);
  usbyte::register_network(m);
  usbyte::register_codec_costs(m);
  usbyte::register_codec_probe(m);
  usbyte::register_policy(m);
  usbyte::register_bytecomp(m);
  usbyte::register_adatopk(m);
  usbyte::register_simulator(m);
  usbyte::register_routes(m);
  usbyte::register_env(m);
  usbyte::register_timeline(m);
  usbyte::register_cuda(m);
  usbyte::register_device_clock(m);
  usbyte::register_kernels(m);
  usbyte::register_communicator(m);
  usbyte::register_mesh_communicator(m);
  usbyte::register_nccl(m);
  usbyte::register_exchange(m);
  usbyte::register_sparse(m);
  usbyte::register_engine(m);
  m.def(
      "build_info",
      [] {
        return py::dict(py::arg("version") = USBYTE_VERSION, py::arg("compiler") = USBYTE_BUILD,
                        py::arg("cuda") = USBYTE_CUDA_BUILD);
      },
      "Version, compiler and build type, and whether and why the CUDA part was built.");
}
