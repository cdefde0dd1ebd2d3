// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <utility>

namespace usbyte {

/// The same object, which ends without the GIL: joining its threads, which may be about to call
/// Python, needs that free.
template <typename T>
std::shared_ptr<T> end_unlocked(std::shared_ptr<T> object) {
  T* const raw = object.get();
  return {raw, [object = std::move(object)](T*) mutable {
            std::optional<pybind11::gil_scoped_release> free;
            if (PyGILState_Check()) free.emplace();
            object.reset();
          }};
}

/// Ends with the GIL: the object holds what Python owns, and its last user may not have that.
template <typename T>
std::shared_ptr<T> end_locked(std::shared_ptr<T> object) {
  T* const raw = object.get();
  return {raw, [object = std::move(object)](T*) mutable {
            pybind11::gil_scoped_acquire gil;
            object.reset();
          }};
}

/// Called about ten times a second by blocking waits, which run without the GIL: lets Ctrl-C end
/// them.
void check_signals();

struct SparseSum;
/// Ids, 1-d int64, values, 1-d uint8, and SparseTraffic.
pybind11::tuple to_python(SparseSum sum);

void register_error(pybind11::module_& m);
void register_tensor(pybind11::module_& m);
void register_plan(pybind11::module_& m);
void register_profile(pybind11::module_& m);
void register_network(pybind11::module_& m);
void register_policy(pybind11::module_& m);
void register_bytecomp(pybind11::module_& m);
void register_adatopk(pybind11::module_& m);
void register_simulator(pybind11::module_& m);
void register_env(pybind11::module_& m);
void register_timeline(pybind11::module_& m);
void register_codec(pybind11::module_& m);
void register_coded_op(pybind11::module_& m);
void register_codec_costs(pybind11::module_& m);
void register_codec_probe(pybind11::module_& m);
void register_communicator(pybind11::module_& m);
void register_mesh_communicator(pybind11::module_& m);
void register_cuda(pybind11::module_& m);
void register_device_clock(pybind11::module_& m);
void register_engine(pybind11::module_& m);
void register_exchange(pybind11::module_& m);
void register_kernels(pybind11::module_& m);
void register_nccl(pybind11::module_& m);
void register_sparse(pybind11::module_& m);
void register_topology(pybind11::module_& m);
void register_mesh_simulator(pybind11::module_& m);
void register_themis(pybind11::module_& m);
void register_routes(pybind11::module_& m);

}  // namespace usbyte
