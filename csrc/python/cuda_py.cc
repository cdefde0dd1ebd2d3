// SPDX-License-Identifier: Apache-2.0
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "cuda/cuda.h"
#include "cuda/cuda_device.h"
#include "cuda/device_clock.h"
#include "cuda/emulation/emulated_cuda.h"
#include "cuda/kernel_arguments.h"
#include "cuda/nccl/nccl.h"
#include "cuda/nccl/nccl_communicator.h"
#include "usbyte/error.h"

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

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

NcclId id_of(const std::string& bytes) {
  NcclId id;
  if (bytes.size() != id.bytes.size()) {
    throw UsageError("NcclCommunicator: an id of " + std::to_string(bytes.size()) +
                     " bytes is none of Nccl.unique_id()");
  }
  std::copy(bytes.begin(), bytes.end(), id.bytes.begin());
  return id;
}

py::bytes unique_id(NcclApi& nccl) {
  NcclId id;
  const NcclResult result = nccl.unique_id(&id);
  if (result != NcclResult::success) {
    throw FaultError("ncclGetUniqueId: " + nccl.error_string(result) + " (" +
                     nccl.last_error(nullptr) + ")");
  }
  return {id.bytes.data(), id.bytes.size()};
}

}  // namespace

void register_nccl(py::module_& m) {
  py::class_<NcclApi, std::shared_ptr<NcclApi>>(m, "Nccl", "The NCCL of this process.")
      .def_property_readonly(
          "version", [](const NcclApi& nccl) { return nccl_version_text(nccl.version()); },
          "Such as \"2.28.9\".")
      .def_property_readonly("path", &NcclApi::path)
      .def("unique_id", &unique_id, "What all ranks make one slot of an NcclCommunicator with.");
  m.def("load_nccl", &load_nccl, py::arg("library") = "",
        py::arg("candidates") = std::vector<std::string>(), Unlocked(),
        "Opens `library`, else torch's copy, else the first of `candidates`, else the system's.");
  m.def("mapped_nccl_copies", &mapped_nccl_copies, "Files; two are one too many.");

  py::class_<NcclCommunicator, Communicator, std::shared_ptr<NcclCommunicator>>(
      m, "NcclCommunicator", "Waits for all ranks; one slot for each id.")
      .def(py::init([](std::shared_ptr<NcclApi> nccl, std::shared_ptr<Cuda> cuda, int rank,
                       int size, const std::vector<py::bytes>& ids, double init_timeout_s,
                       double launch_timeout_s, double close_timeout_s, int min_ctas, int max_ctas,
                       bool windows) {
             std::vector<NcclId> taken;
             for (const py::bytes& id : ids) taken.push_back(id_of(id));
             const NcclOptions options{
                 init_timeout_s, launch_timeout_s, close_timeout_s, {min_ctas, max_ctas}, windows};
             std::shared_ptr<NcclCommunicator> out;
             {
               py::gil_scoped_release free;
               out = std::make_shared<NcclCommunicator>(std::move(nccl), std::move(cuda), rank,
                                                        size, taken, options);
             }
             return end_unlocked(std::move(out));
           }),
           py::arg("nccl"), py::arg("cuda"), py::arg("rank"), py::arg("size"), py::arg("ids"),
           py::kw_only(), py::arg("init_timeout_s") = 60.0, py::arg("launch_timeout_s") = 300.0,
           py::arg("close_timeout_s") = 30.0, py::arg("min_ctas") = 0, py::arg("max_ctas") = 0,
           py::arg("windows") = true)
      .def("failure", &NcclCommunicator::failure, Unlocked(), "Empty while all is well.")
      .def("abort", &NcclCommunicator::abort, Unlocked())
      .def("close", &NcclCommunicator::close, Unlocked(), "All ranks together.")
      .def(
          "allocate",
          [](NcclCommunicator& communicator, size_t bytes) {
            return reinterpret_cast<uintptr_t>(communicator.allocate(bytes));
          },
          py::arg("bytes"), Unlocked(), "Address of device memory.")
      .def(
          "free",
          [](NcclCommunicator& communicator, uintptr_t memory) {
            communicator.free(reinterpret_cast<void*>(memory));
          },
          py::arg("memory"), Unlocked(), "Of `allocate`.")
      .def(
          "register_buffer",
          [](NcclCommunicator& communicator, uintptr_t memory, size_t bytes) {
            communicator.register_buffer(reinterpret_cast<void*>(memory), bytes);
          },
          py::arg("memory"), py::arg("bytes"), Unlocked(), "All ranks together.")
      .def(
          "deregister_buffer",
          [](NcclCommunicator& communicator, uintptr_t memory) {
            communicator.deregister_buffer(reinterpret_cast<void*>(memory));
          },
          py::arg("memory"), Unlocked(), "All ranks together.");
}

}  // namespace usbyte
