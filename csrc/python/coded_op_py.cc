#include "engine/coding/coded_op.h"

#include <pybind11/stl.h>

#include <cfenv>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {
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
  CodedOps(Plan plan, uintptr_t arena, uintptr_t memory, int rank, int size, uint64_t seed)
      : plan_(std::move(plan)),
        ops_(make_coded_ops({plan_, reinterpret_cast<std::byte*>(arena),
                             reinterpret_cast<float*>(memory), rank, size, seed})) {}

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
           py::arg("arena"), py::arg("memory"), py::arg("rank"), py::arg("size"),
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

}  // namespace usbyte
