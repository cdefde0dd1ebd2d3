#include "usbyte/exchange.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "bindings.h"
#include "usbyte/error.h"

namespace py = pybind11;

namespace usbyte {
namespace {

py::memoryview view(std::byte* data, size_t bytes) {
  static std::byte none;  // for what is empty
  return py::memoryview::from_memory(data ? data : &none, static_cast<py::ssize_t>(bytes));
}

/// Hands transfers to a Python callable, which carries them out on a torch.distributed backend.
class PythonExchange : public Exchange {
 public:
  PythonExchange(int rank, int size, py::function transfer, py::function abort)
      : rank_(rank), size_(size), transfer_(std::move(transfer)), abort_(std::move(abort)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void transfer(std::span<const Leg> legs) override {
    std::string error;
    {
      py::gil_scoped_acquire gil;
      try {
        py::list told;
        for (const Leg& leg : legs) {
          told.append(py::make_tuple(
              // torch wants memory that it may write, also for what it sends.
              leg.peer, view(const_cast<std::byte*>(leg.send.data()), leg.send.size()),
              view(leg.receive.data(), leg.receive.size())));
        }
        const py::object problem = transfer_(std::move(told));
        if (problem.is_none()) return;
        error = py::cast<std::string>(problem);
      } catch (py::error_already_set& e) {
        error = e.what();
      }
    }
    throw FaultError(error);
  }

  void abort() override {
    py::gil_scoped_acquire gil;
    try {
      abort_();
    } catch (py::error_already_set& e) {
      e.discard_as_unraisable("abort of an exchange");
    }
  }

 private:
  const int rank_;
  const int size_;
  py::function transfer_, abort_;
};

}  // namespace

void register_exchange(py::module_& m) {
  py::class_<Exchange, std::shared_ptr<Exchange>>(m, "Exchange")
      .def_property_readonly("rank", &Exchange::rank)
      .def_property_readonly("size", &Exchange::size);
  py::class_<PythonExchange, Exchange, std::shared_ptr<PythonExchange>>(
      m, "PythonExchange",
      "Calls transfer([(peer, memory to send, memory to receive into), ...]), which returns what "
      "went wrong or None, and abort().")
      .def(py::init<int, int, py::function, py::function>(), py::arg("rank"), py::arg("size"),
           py::arg("transfer"), py::arg("abort"));
  m.def(
      "make_local_exchanges",
      [](int size) {
        std::vector<std::shared_ptr<Exchange>> out;
        for (auto& e : make_local_exchanges(size)) out.push_back(std::move(e));
        return out;
      },
      py::arg("size"), "Ranks as threads of this process, for tests and benchmarks.");
}

}  // namespace usbyte
