#include "usbyte/cuda.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "cuda/cuda_device.h"
#include "cuda/emulation/emulated_cuda.h"

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

  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Cuda, std::shared_ptr<Cuda>>(m, "Cuda", "A device; streams are cudaStream_t as int.")
      .def_property_readonly("device", &Cuda::device, "Ordinal of the device.")
      .def(
          "create_stream", [](Cuda& cuda, bool high) { return cuda.create_stream(high).handle; },
          py::arg("high_priority") = false, Unlocked())
      .def(
          "destroy_stream", [](Cuda& cuda, uintptr_t stream) { cuda.destroy(CudaStream{stream}); },
          py::arg("stream"), Unlocked())
      .def(
          "synchronize", [](Cuda& cuda, uintptr_t stream) { cuda.synchronize(CudaStream{stream}); },
          py::arg("stream"), Unlocked(), "Blocks until all work on the stream is over.")
      .def(
          "capturing", [](Cuda& cuda, uintptr_t stream) { return cuda.capturing({stream}); },
          py::arg("stream"), Unlocked());
  m.def("make_cuda", &make_cuda, py::arg("device"), Unlocked(),
        "Raises UsageError where there is no CUDA or no such device.");

  py::class_<EmulatedCuda, Cuda, std::shared_ptr<EmulatedCuda>>(
      m, "EmulatedCuda", "CUDA's order on threads and host memory, for tests.")
      .def(
          "enqueue",
          [](EmulatedCuda& cuda, uintptr_t stream, std::function<void()> work) {
            cuda.enqueue({stream}, std::move(work));
          },
          py::arg("stream"), py::arg("work"), Unlocked())
      .def(
          "delay", [](EmulatedCuda& cuda, uintptr_t stream, double s) { cuda.delay({stream}, s); },
          py::arg("stream"), py::arg("seconds"), Unlocked(),
          "Puts a kernel on the stream that takes so long.")
      .def(
          "set_capturing",
          [](EmulatedCuda& cuda, uintptr_t stream, bool on) { cuda.set_capturing({stream}, on); },
          py::arg("stream"), py::arg("capturing"))
      .def_property_readonly("host_waits", &EmulatedCuda::host_waits,
                             "How often the host has waited for work that was not over.")
      .def_property_readonly("live", &EmulatedCuda::live,
                             "Streams, events and allocations that were not given back.")
      .def("poison", &EmulatedCuda::poison, py::arg("error"),
           "From now on every call raises FaultError with this text.");
  m.def(
      "make_emulated_cuda",
      [](double most_delay_s, uint64_t seed) {
        return end_unlocked(make_emulated_cuda({most_delay_s, seed}));
      },
      py::arg("most_delay_s") = 0.0, py::arg("seed") = 1);
}

}  // namespace usbyte
