// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cfenv>

#include "bindings.h"
#include "engine/coding/codec_probe.h"
#include "engine/coding/coded_op.h"
#include "usbyte/codec.h"

namespace py = pybind11;

namespace usbyte {

void register_codec(py::module_& m) {
  py::class_<Codec, std::shared_ptr<Codec>>(m, "Codec", "Makes gradients smaller; see codec.h.")
      .def_property_readonly("spec", &Codec::spec)
      .def_property_readonly("adds", &Codec::adds)
      .def_property_readonly("state_rows", &Codec::state_rows)
      .def_property_readonly("remembers", &Codec::remembers)
      .def_property_readonly("relays", &Codec::relays)
      .def_property_readonly("factors", [](const Codec& c) { return c.matrices() != nullptr; })
      .def("at_step", &Codec::at_step, py::arg("step"))
      .def("message_bytes", &Codec::message_bytes, py::arg("count"));
  m.def(
      "make_codec",
      [](const std::string& spec) { return std::const_pointer_cast<Codec>(make_codec(spec)); },
      py::arg("spec"), "The codec that a spec names; None for \"none\".");
  m.def("codec_names", &codec_names, "Names that make_codec knows, without \"none\".");
}

namespace {

/// Default floating point while it lives, whatever the thread has: ranks must come to the same.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t before_;
};

/// The coded ops of a plan, for who carries out its requests by other means than an engine.
class CodedOps {
 public:
  CodedOps(Plan plan, uintptr_t flat_buffer, uintptr_t codec_state, int rank, int size,
           uint64_t seed)
      : plan_(std::move(plan)),
        ops_(make_coded_ops({plan_, reinterpret_cast<std::byte*>(flat_buffer),
                             reinterpret_cast<float*>(codec_state), rank, size, seed})) {}

  CodedOp& at(int op) {
    const auto i = static_cast<size_t>(op);
    if (op < 0 || i >= ops_.size() || !ops_[i]) {
      throw py::index_error("op " + std::to_string(op) + " has no codec");
    }
    return *ops_[i];
  }

 private:
  const Plan plan_;
  const std::vector<std::unique_ptr<CodedOp>> ops_;
};

}  // namespace

void register_coded_op(py::module_& m) {
  py::class_<CodedOps>(m, "CodedOps",
                       "Codes ops of a plan, whose messages somebody else sends; see coded_op.h.")
      .def(py::init<Plan, uintptr_t, uintptr_t, int, int, uint64_t>(), py::arg("plan"),
           py::arg("flat_buffer"), py::arg("codec_state"), py::arg("rank"), py::arg("size"),
           py::arg("seed") = 0)
      .def(
          "request",
          [](CodedOps& ops, int op) {
            const Request& r = ops.at(op).request();
            return py::make_tuple(std::string(name(r.kind)), std::string(name(r.dtype)),
                                  reinterpret_cast<uintptr_t>(r.recv.front().data),
                                  r.recv.front().count);
          },
          py::arg("op"), "Kind, dtype, address and elements of what travels, in place.")
      .def(
          "encode", [](CodedOps& ops, int op, int64_t step) { ops.at(op).encode({step}); },
          py::arg("op"), py::arg("step"), py::call_guard<py::gil_scoped_release, DefaultFloats>())
      .def(
          "decode", [](CodedOps& ops, int op, int64_t step) { ops.at(op).decode({step}); },
          py::arg("op"), py::arg("step"), py::call_guard<py::gil_scoped_release, DefaultFloats>());
}

void register_codec_probe(py::module_& m) {
  py::class_<MeasuredCodec>(m, "MeasuredCodec",
                            "What a codec was measured to cost one thread, or a device.")
      .def_readonly("spec", &MeasuredCodec::spec)
      .def_readonly("cost", &MeasuredCodec::cost)
      .def_readonly("encode_residual", &MeasuredCodec::encode_residual,
                    "Median over sizes of the fit's relative error.")
      .def_readonly("decode_residual", &MeasuredCodec::decode_residual)
      .def_readonly("largest_bytes", &MeasuredCodec::largest_bytes,
                    "Gradients of the largest sample.")
      .def_readonly("message_bytes", &MeasuredCodec::message_bytes, "Of their message.");
  m.def("measure_codec", &measure_codec, py::arg("spec"), py::arg("budget_s"),
        py::arg("device").none(true) = nullptr, py::call_guard<py::gil_scoped_release>(),
        "Measures a codec on this thread, or of gradients on a device, for about that many "
        "seconds.");
}

}  // namespace usbyte
