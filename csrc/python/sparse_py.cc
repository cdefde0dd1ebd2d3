// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "policy/transforms/sparse_choice.h"
#include "usbyte/error.h"
#include "usbyte/exchange.h"
#include "usbyte/sparse.h"

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

namespace {

/// What an array of its memory keeps alive.
template <typename T>
py::capsule owner(std::unique_ptr<T> object) {
  return py::capsule(object.release(), [](void* p) { delete static_cast<T*>(p); });
}

}  // namespace

py::tuple to_python(SparseSum sum) {
  auto ids = std::make_unique<std::vector<int64_t>>(std::move(sum.rows.ids));
  auto values = std::make_unique<Buffer>(std::move(sum.rows.values));
  const int64_t count = std::ssize(*ids), bytes = values->size();
  const int64_t* const first = ids->data();
  const auto* const begin = reinterpret_cast<const uint8_t*>(values->data());
  return py::make_tuple(py::array_t<int64_t>(count, first, owner(std::move(ids))),
                        py::array_t<uint8_t>(bytes, begin, owner(std::move(values))), sum.traffic);
}

void register_sparse(py::module_& m) {
  py::class_<SparseTraffic>(m, "SparseTraffic", "What a sum was for one rank.")
      .def_readonly("sent_bytes", &SparseTraffic::sent_bytes)
      .def_readonly("received_bytes", &SparseTraffic::received_bytes)
      .def_readonly("own_rows", &SparseTraffic::own_rows)
      .def_readonly("sum_rows", &SparseTraffic::sum_rows)
      .def_readonly("skew", &SparseTraffic::skew)
      .def_readonly("push_imbalance", &SparseTraffic::push_imbalance)
      .def_readonly("pull_imbalance", &SparseTraffic::pull_imbalance);
  m.def(
      "sparse_schemes",
      [] {
        py::list out;
        for (const SparseScheme& s : sparse_schemes()) out.append(std::string(s.name));
        return out;
      },
      "Names of the ways to add up sparse gradients.");
  m.def(
      "sparse_all_reduce",
      [](const std::string& scheme, Exchange& exchange, int64_t rows, int64_t width,
         const std::string& dtype, uintptr_t ids, int64_t count, uintptr_t values, double scale,
         uint64_t seed) {
        const SparseShape shape{rows, width, dtype_from_name(dtype)};
        const RowsView mine{{reinterpret_cast<const int64_t*>(ids), static_cast<size_t>(count)},
                            reinterpret_cast<const std::byte*>(values)};
        SparseSum sum;
        {
          py::gil_scoped_release free;
          sum = sparse_scheme(scheme).all_reduce(exchange, shape, mine, {scale, seed});
        }
        return to_python(std::move(sum));
      },
      py::arg("scheme"), py::arg("exchange"), py::arg("rows"), py::arg("width"), py::arg("dtype"),
      py::arg("ids"), py::arg("count"), py::arg("values"), py::arg("scale") = 1.0,
      py::arg("seed") = 0, "Ids, 1-d int64, values, 1-d uint8, and SparseTraffic.");
  py::class_<SparseChoice>(m, "SparseChoice", "What a scheme is predicted to cost.")
      .def_readonly("scheme", &SparseChoice::scheme)
      .def_readonly("bytes", &SparseChoice::bytes)
      .def_readonly("seconds", &SparseChoice::seconds);
  m.def(
      "sparse_choices",
      [](const NetworkModel& network, int64_t rows, int64_t width, const std::string& dtype,
         double of_one, double of_all) {
        return sparse_choices(network, {rows, width, dtype_from_name(dtype)}, of_one, of_all);
      },
      py::arg("network"), py::arg("rows"), py::arg("width"), py::arg("dtype"), py::arg("of_one"),
      py::arg("of_all"), "Ways to add up such gradients, the fastest first; see sparse_choice.h.");
  m.def("measure_row_s", &measure_row_s, py::arg("budget_s"),
        py::call_guard<py::gil_scoped_release>(), "CodecCosts.row_s of this machine.");
  m.def("with_schemes", &with_schemes, py::arg("plan"), py::arg("network"), py::arg("costs"),
        "The plan with schemes where they pay for what codecs pick; see sparse_choice.h.");
  m.def(
      "sparse_bytes",
      [](const std::string& scheme, int64_t rows, int64_t width, const std::string& dtype,
         std::vector<double> density, double skew) {
        if (density.empty())
          throw UsageError("sparse_bytes: density is empty; give that of 1 rank");
        const int ranks = static_cast<int>(density.size());
        const SparseShape shape{rows, width, dtype_from_name(dtype)};
        return sparse_scheme(scheme).bytes(ranks, shape, {std::move(density), skew});
      },
      py::arg("scheme"), py::arg("rows"), py::arg("width"), py::arg("dtype"), py::arg("density"),
      py::arg("skew") = 1.0,
      "Bytes that the busiest rank sends or receives. density: shares of all rows that are in the "
      "sums of 1, 2, ... ranks.");
}

}  // namespace usbyte
