#pragma once

#include <pybind11/pybind11.h>

namespace usbyte {

/// Called about ten times a second by blocking waits, which run without the GIL: lets Ctrl-C end
/// them.
void check_signals();

void register_error(pybind11::module_& m);
void register_tensor(pybind11::module_& m);
void register_plan(pybind11::module_& m);
void register_profile(pybind11::module_& m);
void register_network(pybind11::module_& m);
void register_policy(pybind11::module_& m);
void register_simulator(pybind11::module_& m);
void register_env(pybind11::module_& m);
void register_timeline(pybind11::module_& m);
void register_communicator(pybind11::module_& m);
void register_engine(pybind11::module_& m);
void register_cuda(pybind11::module_& m);

}  // namespace usbyte
