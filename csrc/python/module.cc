// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <string_view>

#include "bindings.h"
#include "usbyte/env.h"
#include "usbyte/error.h"

namespace py = pybind11;

namespace usbyte {

namespace {

// Messages may quote the bytes of a file, and end inside a character. The error is made at once,
// not where it is caught: `usbyte.errors` asks which module has called the core.
void set_error(const char* name, const Error& error) {
  const std::string_view text = error.what();
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  const py::object kind = py::module_::import("usbyte._core").attr(name);
  PyErr_SetObject(kind.ptr(), kind(message).ptr());
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

void register_env(py::module_& m) {
  py::class_<EnvVariable>(m, "EnvVariable", "One USBYTE_* variable and the value in force.")
      .def_readonly("name", &EnvVariable::name)
      .def_readonly("value", &EnvVariable::value, "As text; empty where the variable has no value.")
      .def_readonly("unit", &EnvVariable::unit, "\"s\", \"bytes\" or \"\".")
      .def_readonly("description", &EnvVariable::description)
      .def_readonly("set", &EnvVariable::set, "From the environment rather than the default.")
      .def("__repr__", [](const EnvVariable& variable) {
        return "EnvVariable(" + variable.name + "=" + variable.value +
               (variable.set ? ")" : ", default)");
      });

  py::class_<Env>(m, "Env", "Every USBYTE_* variable; `variables` documents them.")
      .def_static("read", &Env::read,
                  "Reads the environment.\n\n"
                  "Raises:\n    EnvError: A value cannot be used, or a USBYTE_* name is unknown.")
      .def_readonly("backend", &Env::backend)
      .def_readonly("policy", &Env::policy)
      .def_readonly("partition_bytes", &Env::partition_bytes)
      .def_readonly("credit_bytes", &Env::credit_bytes)
      .def_readonly("bucket_bytes", &Env::bucket_bytes)
      .def_readonly("topology", &Env::topology)
      .def_readonly("one_shot_bytes", &Env::one_shot_bytes)
      .def_readonly("learning_steps", &Env::learning_steps)
      .def_readonly("stall_warning_s", &Env::stall_warning_s)
      .def_readonly("stall_limit_s", &Env::stall_limit_s)
      .def_readonly("start_limit_s", &Env::start_limit_s)
      .def_readonly("check_steps", &Env::check_steps)
      .def_readonly("timeline", &Env::timeline)
      .def_readonly("timeline_steps", &Env::timeline_steps)
      .def_readonly("report", &Env::report)
      .def_readonly("flight", &Env::flight)
      .def_readonly("job_token", &Env::job_token)
      .def_readonly("log_level", &Env::log_level)
      .def_readonly("chunk_bytes", &Env::chunk_bytes)
      .def_readonly("nccl_library", &Env::nccl_library)
      .def_readonly("nccl_communicators", &Env::nccl_communicators)
      .def_readonly("nccl_max_ctas", &Env::nccl_max_ctas)
      .def_readonly("nccl_register", &Env::nccl_register)
      .def_readonly("variables", &Env::variables, "List of EnvVariable, in a fixed order.");
}

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
