#include <pybind11/stl.h>

#include "bindings.h"
#include "usbyte/cuda_device.h"

namespace py = pybind11;

namespace usbyte {

void register_cuda(py::module_& m) {
  py::class_<CudaDevice>(m, "CudaDevice")
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("compute_capability", &CudaDevice::compute_capability, "Such as \"9.0\".")
      .def_readonly("memory_bytes", &CudaDevice::memory_bytes)
      .def("__repr__", [](const CudaDevice& device) {
        return "CudaDevice(" + device.name + ", " + device.compute_capability + ")";
      });

  py::class_<CudaInfo>(m, "CudaInfo", "What this build and this machine offer of CUDA.")
      .def_readonly("built", &CudaInfo::built, "Whether the extension has a CUDA part.")
      .def_readonly("runtime_version", &CudaInfo::runtime_version)
      .def_readonly("driver_version", &CudaInfo::driver_version,
                    "Newest CUDA the driver supports; empty without a driver.")
      .def_readonly("devices", &CudaInfo::devices)
      .def_readonly("reason", &CudaInfo::reason, "Why there are no devices, with a remedy.");

  m.def("cuda_info", &cuda_info, py::call_guard<py::gil_scoped_release>(),
        "Looks for CUDA devices; never fails. Do not fork afterwards a process that uses CUDA.");
}

}  // namespace usbyte
