#include "usbyte/env.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

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

}  // namespace usbyte
