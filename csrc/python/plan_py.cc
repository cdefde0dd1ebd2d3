#include "usbyte/plan.h"

#include <pybind11/stl.h>

#include <limits>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {

void register_plan(py::module_& m) {
  using Range = std::pair<int64_t, int64_t>;
  py::class_<SparseAllReduceSpec>(m, "SparseOp", "What a sparse_all_reduce adds up, and how.")
      .def(py::init<int, std::string, int64_t>(), py::arg("tensor"), py::arg("scheme") = "zen",
           py::arg("bytes") = 0)
      .def_readonly("tensor", &SparseAllReduceSpec::tensor)
      .def_readonly("scheme", &SparseAllReduceSpec::scheme)
      .def_readonly("bytes", &SparseAllReduceSpec::bytes)
      .def("__eq__", &SparseAllReduceSpec::operator==);
  py::class_<Op>(m, "Op", "One collective on blocks (ranges of arena elements).")
      .def(py::init([](const std::string& kind, const std::vector<Range>& blocks,
                       int64_t window_bytes, bool fence, const std::string& codec,
                       std::optional<SparseAllReduceSpec> sparse, const std::string& scheme,
                       std::optional<MeshSchedule> route, int line) {
             Op op{collective_from_name(kind), {},     window_bytes,     fence, codec,
                   std::move(sparse),          scheme, std::move(route), line};
             for (auto [begin, end] : blocks) op.blocks.push_back({begin, end});
             return op;
           }),
           py::arg("kind"), py::arg("blocks") = std::vector<Range>{},
           py::arg("window_bytes") = std::numeric_limits<int64_t>::max(), py::arg("fence") = false,
           py::arg("codec") = "none", py::arg("sparse") = std::nullopt, py::arg("scheme") = "",
           py::arg("route") = std::nullopt, py::arg("line") = -1)
      .def_property_readonly("kind", [](const Op& op) { return std::string(name(op.kind)); })
      .def_property_readonly("blocks",
                             [](const Op& op) {
                               std::vector<Range> out;
                               for (Block b : op.blocks) out.emplace_back(b.begin, b.end);
                               return out;
                             })
      .def_readonly("window_bytes", &Op::window_bytes)
      .def_readonly("fence", &Op::fence)
      .def_readonly("codec", &Op::codec)
      .def_readonly("sparse", &Op::sparse)
      .def_readonly("scheme", &Op::scheme)
      .def_readonly("route", &Op::route)
      .def_readonly("line", &Op::line)
      .def("__eq__", &Op::operator==);

  py::class_<Plan>(m, "Plan", "What one iteration communicates, in launch order.")
      .def(py::init<std::string, std::vector<TensorSpec>, std::vector<Op>>(), py::arg("policy"),
           py::arg("tensors"), py::arg("ops"))
      .def_property_readonly("policy", &Plan::policy)
      .def_property_readonly("tensors", &Plan::tensors)
      .def_property_readonly("ops", &Plan::ops)
      .def_property_readonly("numel", &Plan::numel)
      .def_property_readonly("arena_bytes", &Plan::arena_bytes)
      .def("byte_offset", &Plan::byte_offset, py::arg("element"))
      .def("bytes", &Plan::bytes, py::arg("op"))
      .def("message_bytes", &Plan::message_bytes, py::arg("op"))
      .def("tensors_of", &Plan::tensors_of, py::arg("op"))
      .def("describe", &Plan::describe, py::arg("op"))
      .def("to_json", &Plan::to_json)
      .def_static("from_json", &Plan::from_json, py::arg("json"))
      .def("hash", &Plan::hash)
      .def("__eq__", &Plan::operator==);
  m.def(
      "with_codecs",
      [](const Plan& plan, const std::vector<std::string>& codec_of, bool sharded) {
        return with_codecs(plan, codec_of, sharded);
      },
      py::arg("plan"), py::arg("codec_of"), py::arg("sharded") = false,
      "The same plan with each tensor's codec; see plan.h.");
}

}  // namespace usbyte
