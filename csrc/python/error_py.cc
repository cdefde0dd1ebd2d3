#include <exception>
#include <string_view>

#include "bindings.h"
#include "usbyte/error.h"

namespace py = pybind11;

namespace usbyte {
namespace {

// Messages may quote the bytes of a file, and end inside a character.
void set_error(const char* name, const Error& error) {
  const std::string_view text = error.what();
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  PyErr_SetObject(py::module_::import("usbyte._core").attr(name).ptr(), message.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const UsageError& e) {
    set_error("UsageError", e);
  } catch (const PlanError& e) {
    set_error("PlanError", e);
  } catch (const MismatchError& e) {
    set_error("MismatchError", e);
  } catch (const FaultError& e) {
    set_error("FaultError", e);
  } catch (const EnvError& e) {
    set_error("EnvError", e);
  } catch (const Error& e) {
    set_error("Error", e);
  }
}

}  // namespace

void register_error(py::module_& m) {
  const py::exception<Error> base(m, "Error", PyExc_RuntimeError);
  // A wrong call is a ValueError too, as Python users expect.
  const py::tuple usage_bases = py::make_tuple(base, py::handle(PyExc_ValueError));
  py::exception<UsageError>(m, "UsageError", usage_bases);
  py::exception<PlanError>(m, "PlanError", base);
  py::exception<MismatchError>(m, "MismatchError", base);
  py::exception<FaultError>(m, "FaultError", base);
  py::exception<EnvError>(m, "EnvError", base);
  for (const char* name :
       {"Error", "UsageError", "PlanError", "MismatchError", "FaultError", "EnvError"}) {
    m.attr(name).attr("__module__") = "usbyte.errors";
  }
  py::register_local_exception_translator(translate);
}

}  // namespace usbyte
