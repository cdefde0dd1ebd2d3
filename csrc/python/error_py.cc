#include "bindings.h"
#include "usbyte/error.h"

namespace py = pybind11;

namespace usbyte {

void register_error(py::module_& m) {
  auto& base = py::register_local_exception<Error>(m, "Error", PyExc_RuntimeError);
  // A wrong call is a ValueError too, as Python users expect.
  const py::tuple usage_bases = py::make_tuple(base, py::handle(PyExc_ValueError));
  py::register_local_exception<UsageError>(m, "UsageError", usage_bases);
  py::register_local_exception<PlanError>(m, "PlanError", base);
  py::register_local_exception<MismatchError>(m, "MismatchError", base);
  py::register_local_exception<FaultError>(m, "FaultError", base);
  py::register_local_exception<EnvError>(m, "EnvError", base);
  for (const char* name :
       {"Error", "UsageError", "PlanError", "MismatchError", "FaultError", "EnvError"}) {
    m.attr(name).attr("__module__") = "usbyte.errors";
  }
}

}  // namespace usbyte
