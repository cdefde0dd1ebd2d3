// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <limits>
#include <utility>

#include "bindings.h"
#include "plan/plan_index.h"
#include "usbyte/plan.h"
#include "usbyte/profile.h"
#include "usbyte/tensor.h"

namespace py = pybind11;

namespace usbyte {

void register_tensor(py::module_& m) {
  py::class_<TensorSpec>(m, "TensorSpec",
                         "One gradient in the flat buffer; numel and offset in elements.")
      .def(py::init([](std::string name, int64_t numel, const std::string& dtype, int64_t offset,
                       int64_t rows, int64_t width) {
             return TensorSpec{std::move(name), numel, dtype_from_name(dtype), offset, rows, width};
           }),
           py::arg("name"), py::arg("numel"), py::arg("dtype") = "float32", py::arg("offset") = 0,
           py::arg("rows") = 1, py::arg("width") = 0)
      .def_readonly("name", &TensorSpec::name)
      .def_readonly("numel", &TensorSpec::numel)
      .def_readonly("offset", &TensorSpec::offset)
      .def_readonly("rows", &TensorSpec::rows)
      .def_readonly("width", &TensorSpec::width)
      .def_property_readonly("sparse", &TensorSpec::sparse)
      .def_property_readonly("dtype",
                             [](const TensorSpec& t) { return std::string(name(t.dtype)); })
      .def_property_readonly("end", &TensorSpec::end)
      .def("__eq__", &TensorSpec::operator==)
      .def("__repr__", [](const TensorSpec& t) {
        return "TensorSpec(" + t.name + ", " + std::to_string(t.numel) + " x " +
               std::string(name(t.dtype)) + " at " + std::to_string(t.offset) + ")";
      });
}

void register_plan(py::module_& m) {
  using Range = std::pair<int64_t, int64_t>;
  py::class_<SparseAllReduceSpec>(m, "SparseOp", "What a sparse_all_reduce adds up, and how.")
      .def(py::init<int, std::string, int64_t>(), py::arg("tensor"), py::arg("scheme") = "zen",
           py::arg("bytes") = 0)
      .def_readonly("tensor", &SparseAllReduceSpec::tensor)
      .def_readonly("scheme", &SparseAllReduceSpec::scheme)
      .def_readonly("bytes", &SparseAllReduceSpec::bytes)
      .def("__eq__", &SparseAllReduceSpec::operator==);
  py::class_<Op>(m, "Op", "One collective on blocks (ranges of flat buffer elements).")
      .def(py::init([](const std::string& kind, const std::vector<Range>& blocks,
                       int64_t window_bytes, bool fence, const std::string& codec,
                       std::optional<SparseAllReduceSpec> sparse, const std::string& scheme,
                       std::optional<MeshSchedule> route, int dimension) {
             Op op{collective_from_name(kind), {},     window_bytes,     fence,    codec,
                   std::move(sparse),          scheme, std::move(route), dimension};
             for (auto [begin, end] : blocks) op.blocks.push_back({begin, end});
             return op;
           }),
           py::arg("kind"), py::arg("blocks") = std::vector<Range>{},
           py::arg("window_bytes") = std::numeric_limits<int64_t>::max(), py::arg("fence") = false,
           py::arg("codec") = "none", py::arg("sparse") = std::nullopt, py::arg("scheme") = "",
           py::arg("route") = std::nullopt, py::arg("dimension") = -1)
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
      .def_readonly("dimension", &Op::dimension)
      .def("__eq__", &Op::operator==);

  py::class_<Plan>(m, "Plan", "What one iteration communicates, in launch order.")
      .def(py::init<std::string, std::vector<TensorSpec>, std::vector<Op>>(), py::arg("policy"),
           py::arg("tensors"), py::arg("ops"))
      .def_property_readonly("policy", &Plan::policy)
      .def_property_readonly("tensors", &Plan::tensors)
      .def_property_readonly("ops", &Plan::ops)
      .def_property_readonly("numel", &Plan::numel)
      .def_property_readonly("flat_buffer_bytes", &Plan::flat_buffer_bytes)
      .def("byte_offset", &Plan::byte_offset, py::arg("element"))
      .def("bytes", &Plan::bytes, py::arg("op"))
      .def("message_bytes", &Plan::message_bytes, py::arg("op"))
      .def("tensors_of", &Plan::tensors_of, py::arg("op"))
      .def(
          "co_arriving",
          [](const Plan& plan) {
            CoArriving found = co_arriving(plan);
            return std::pair(std::move(found.group_of), std::move(found.tensors));
          },
          "By tensor, its group; by group, the tensors that have arrived as soon as its own have.")
      .def("describe", &Plan::describe, py::arg("op"))
      .def("to_json", &Plan::to_json)
      .def_static("from_json", &Plan::from_json, py::arg("json"))
      .def("hash", &Plan::hash)
      .def("__eq__", &Plan::operator==);
  m.def(
      "shard",
      [](Range block, int rank, int size) {
        const Block own = shard({block.first, block.second}, rank, size);
        return Range(own.begin, own.end);
      },
      py::arg("block"), py::arg("rank"), py::arg("size"),
      "Part of a block that a rank owns between a reduce_scatter and its all_gather; see plan.h.");
  m.def(
      "with_codecs",
      [](const Plan& plan, const std::vector<std::string>& codec_of, bool sharded) {
        return with_codecs(plan, codec_of, sharded);
      },
      py::arg("plan"), py::arg("codec_of"), py::arg("sharded") = false,
      "The same plan with each tensor's codec; see plan.h.");
}

void register_profile(py::module_& m) {
  using Times = std::vector<double>;
  py::class_<Profile>(m, "Profile",
                      "Measured iteration: tensors in forward order, need_s and ready_s in seconds "
                      "since the forward pass began.")
      .def(py::init([](std::vector<TensorSpec> tensors, Times need_s, Times ready_s, double step_s,
                       double update_s, std::string model, Times need_spread_s,
                       Times ready_spread_s) {
             Profile p{std::move(tensors),
                       std::move(need_s),
                       std::move(ready_s),
                       step_s,
                       update_s,
                       std::move(model),
                       std::move(need_spread_s),
                       std::move(ready_spread_s)};
             p.validate();
             return p;
           }),
           py::arg("tensors"), py::arg("need_s"), py::arg("ready_s"), py::arg("step_s") = 0.0,
           py::arg("update_s") = 0.0, py::arg("model") = "", py::arg("need_spread_s") = Times{},
           py::arg("ready_spread_s") = Times{})
      .def_readonly("tensors", &Profile::tensors)
      .def_readonly("need_s", &Profile::need_s)
      .def_readonly("ready_s", &Profile::ready_s)
      .def_readonly("step_s", &Profile::step_s)
      .def_readonly("update_s", &Profile::update_s)
      .def_readonly("model", &Profile::model)
      .def_readonly("need_spread_s", &Profile::need_spread_s)
      .def_readonly("ready_spread_s", &Profile::ready_spread_s)
      .def_property_readonly("backward_end_s", &Profile::backward_end_s)
      .def_property_readonly("iteration_s", &Profile::iteration_s)
      .def_property_readonly("bytes", &Profile::bytes)
      .def("to_json", &Profile::to_json)
      .def_static("from_json", &Profile::from_json, py::arg("json"));
  m.def(
      "due_times",
      [](const Profile& profile, const std::string& overlap) {
        return due_times(profile, overlap_from_name(overlap));
      },
      py::arg("profile"), py::arg("overlap"),
      "By tensor, the latest arrival that delays nothing, seconds since the forward pass began.");
}

}  // namespace usbyte
