#include "usbyte/kernels.h"

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings.h"
#include "usbyte/cuda.h"

namespace py = pybind11;

namespace usbyte {
namespace {

// Addresses, and what the structs of kernels.h hold besides.
using SgdRow = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t, bool>;
using AdamRow = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t>;

void* at(uintptr_t address) { return reinterpret_cast<void*>(address); }

void update_sgd(Cuda& cuda, const std::vector<SgdRow>& rows, const std::string& dtype,
                const SgdOptions& options, uintptr_t stream) {
  std::vector<SgdTensor> tensors;
  for (const auto& [param, grad, momentum, count, first] : rows) {
    tensors.push_back({at(param), at(grad), at(momentum), count, first});
  }
  cuda.update_sgd(tensors, dtype_from_name(dtype), options, {stream});
}

void update_adam(Cuda& cuda, const std::vector<AdamRow>& rows, const std::string& dtype,
                 const AdamOptions& options, uintptr_t stream) {
  std::vector<AdamTensor> tensors;
  for (const auto& [param, grad, exp_avg, exp_avg_sq, count, step] : rows) {
    tensors.push_back({at(param), at(grad), at(exp_avg), at(exp_avg_sq), count, step});
  }
  cuda.update_adam(tensors, dtype_from_name(dtype), options, {stream});
}

}  // namespace

void register_kernels(py::module_& m) {
  py::class_<SgdOptions>(m, "SgdOptions", "Hyper-parameters of torch.optim.SGD.")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay,
                       bool nesterov, bool maximize) {
             return SgdOptions{lr, momentum, dampening, weight_decay, nesterov, maximize};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
           py::arg("weight_decay"), py::arg("nesterov"), py::arg("maximize"));
  py::class_<AdamOptions>(m, "AdamOptions", "Hyper-parameters of torch.optim.Adam and AdamW.")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool decoupled, bool maximize) {
             return AdamOptions{lr, beta1, beta2, eps, weight_decay, decoupled, maximize};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("decoupled"), py::arg("maximize"));
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def(
      "scatter_add",
      [](Cuda& cuda, uintptr_t target, uintptr_t rows, uintptr_t values, const std::string& dtype,
         int64_t count, int64_t width, uintptr_t stream) {
        cuda.scatter_add(at(target), static_cast<const int64_t*>(at(rows)), at(values),
                         dtype_from_name(dtype), count, width, {stream});
      },
      py::arg("cuda"), py::arg("target"), py::arg("rows"), py::arg("values"), py::arg("dtype"),
      py::arg("count"), py::arg("width"), py::arg("stream"), Unlocked(),
      "Adds rows that do not decrease, equal ones in order.");
  m.def("update_sgd", &update_sgd, py::arg("cuda"), py::arg("rows"), py::arg("dtype"),
        py::arg("options"), py::arg("stream"), Unlocked(),
        "One step of each row: (param, grad, momentum buffer or 0, count, first step).");
  m.def("update_adam", &update_adam, py::arg("cuda"), py::arg("rows"), py::arg("dtype"),
        py::arg("options"), py::arg("stream"), Unlocked(),
        "One step of each row: (param, grad, exp_avg, exp_avg_sq, count, step from 1).");
}

}  // namespace usbyte
