#include "usbyte/timeline.h"

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_timeline(py::module_& m) {
  m.def("now_s", &now_s, "Seconds on the steady clock, the time base of every measurement.");
  py::class_<TimelineWriter, std::shared_ptr<TimelineWriter>>(
      m, "TimelineWriter", "Writes a Chrome trace; steps is 'A:B', half open.")
      .def(py::init([](const std::string& path, int rank, const std::string& steps) {
             return std::make_shared<TimelineWriter>(path, rank, StepRange::parse(steps));
           }),
           py::arg("path"), py::arg("rank"), py::arg("steps") = "0:");
}

}  // namespace usbyte
