#include "cuda/device_clock.h"

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_device_clock(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Moment>(m, "Moment", "When a device reaches a point of one of its streams.");
  py::class_<DeviceClock>(m, "DeviceClock", "Relates a device's time to the host's.")
      .def(py::init<std::shared_ptr<Cuda>>(), py::arg("cuda"), Unlocked())
      .def(
          "mark", [](DeviceClock& clock, uintptr_t stream) { return clock.mark({stream}); },
          py::arg("stream"), Unlocked())
      .def("passed", &DeviceClock::passed, py::arg("moment"))
      .def("seconds", &DeviceClock::seconds, py::arg("moment"), Unlocked(),
           "Seconds on the steady clock; waits until the moment has passed.")
      .def("between", &DeviceClock::between, py::arg("begin"), py::arg("end"), Unlocked(),
           "Seconds between two moments; waits until both have passed.")
      .def("anchor", &DeviceClock::anchor, Unlocked(),
           "Keeps the times to come exact; call it now and then.");
}

}  // namespace usbyte
