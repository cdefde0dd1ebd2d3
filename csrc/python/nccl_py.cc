#include "usbyte/nccl.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>

#include "bindings.h"
#include "usbyte/error.h"
#include "usbyte/nccl_communicator.h"

namespace py = pybind11;

namespace usbyte {
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
