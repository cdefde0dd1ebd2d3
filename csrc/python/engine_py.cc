// SPDX-License-Identifier: Apache-2.0
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings.h"
#include "cuda/device_clock.h"
#include "usbyte/engine.h"
#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace py = pybind11;

namespace usbyte {

namespace {

// Joining the engine's thread, which may be about to call Python, needs the GIL to be free.
void destroy(Engine* engine) {
  std::optional<py::gil_scoped_release> free;
  if (PyGILState_Check()) free.emplace();
  delete engine;
}

/// Keeps the communicator alive as long as the engine, and makes the engine's end explicit.
class PyEngine {
 public:
  PyEngine(Plan plan, uintptr_t flat_buffer, std::shared_ptr<Communicator> communicator,
           EngineOptions options)
      : communicator_(std::move(communicator)),
        on_device_(options.device != nullptr),
        engine_(new Engine(std::move(plan), reinterpret_cast<std::byte*>(flat_buffer),
                           *communicator_, std::move(options)),
                destroy) {}

  /// Shared: a signal handler may close the engine while a call waits. With the GIL, as `close`.
  std::shared_ptr<Engine> get() const {
    if (!engine_) throw UsageError("this engine is closed");
    return engine_;
  }
  void close() { engine_.reset(); }

  bool on_device() const { return on_device_; }

 private:
  std::shared_ptr<Communicator> communicator_;
  bool on_device_;
  std::shared_ptr<Engine> engine_;
};

// Only the call is without the GIL: another thread may close the engine that is asked for.
template <typename Call>
auto unlocked(const PyEngine& e, Call call) {
  const auto engine = e.get();
  py::gil_scoped_release free;
  return call(*engine);
}

}  // namespace

void register_engine(py::module_& m) {
  py::class_<PyEngine>(m, "Engine", "Executes a plan in the background; see engine.h.")
      .def(
          py::init([](Plan plan, uintptr_t flat_buffer, std::shared_ptr<Communicator> communicator,
                      double stall_warning_s, double stall_limit_s, int64_t steps_before,
                      bool hold_gathers, std::shared_ptr<Cuda> device,
                      std::shared_ptr<Exchange> exchange, double scale, uintptr_t codec_state,
                      uint64_t seed, bool timed, std::function<void(const std::string&)> on_warning,
                      std::function<std::string(const std::string&)> on_stall,
                      std::function<std::string(const std::string&)> on_fault) {
            EngineOptions options{stall_warning_s,
                                  stall_limit_s,
                                  steps_before,
                                  hold_gathers,
                                  std::move(device),
                                  exchange ? end_locked(std::move(exchange)) : nullptr,
                                  scale,
                                  reinterpret_cast<float*>(codec_state),
                                  seed,
                                  timed,
                                  std::move(on_warning),
                                  std::move(on_stall),
                                  std::move(on_fault)};
            py::gil_scoped_release free;
            return std::make_unique<PyEngine>(std::move(plan), flat_buffer, std::move(communicator),
                                              std::move(options));
          }),
          py::arg("plan"), py::arg("flat_buffer"), py::arg("communicator"), py::kw_only(),
          py::arg("stall_warning_s") = 60.0, py::arg("stall_limit_s") = 300.0,
          py::arg("steps_before") = 0, py::arg("hold_gathers") = false, py::arg("device") = nullptr,
          py::arg("exchange") = nullptr, py::arg("scale") = 1.0, py::arg("codec_state") = 0,
          py::arg("seed") = 0, py::arg("timed") = false, py::arg("on_warning") = nullptr,
          py::arg("on_stall") = nullptr, py::arg("on_fault") = nullptr)
      .def_property_readonly("plan", [](const PyEngine& e) { return e.get()->plan(); })
      .def(
          "begin_step",
          [](const PyEngine& e, uintptr_t stream) {
            unlocked(e, [&](Engine& engine) { engine.begin_step({stream}); });
          },
          py::arg("stream") = 0)
      // Calls of a device may block until others, who need the GIL, end what they wait for. On the
      // host a lock is held for well below a microsecond, and small gradients are copied.
      .def(
          "ready",
          [](const PyEngine& e, int tensor, uintptr_t stream, uintptr_t gradient) {
            const auto engine = e.get();
            std::optional<py::gil_scoped_release> free;
            if (e.on_device()) free.emplace();
            return engine->ready(tensor, {stream}, reinterpret_cast<const void*>(gradient));
          },
          py::arg("tensor"), py::arg("stream") = 0, py::arg("gradient") = 0)
      .def(
          "ready_rows",
          [](const PyEngine& e, int tensor, uintptr_t ids, int64_t most, uintptr_t values,
             uintptr_t stream, uintptr_t count) {
            const RowsView rows{{reinterpret_cast<const int64_t*>(ids), static_cast<size_t>(most)},
                                reinterpret_cast<const std::byte*>(values)};
            const auto engine = e.get();
            std::optional<py::gil_scoped_release> free;
            if (e.on_device()) free.emplace();
            engine->ready_rows(tensor, rows, {stream}, reinterpret_cast<const int64_t*>(count));
          },
          py::arg("tensor"), py::arg("ids"), py::arg("most"), py::arg("values"),
          py::arg("stream") = 0, py::arg("count") = 0)
      .def(
          "take_rows",
          [](const PyEngine& e, int tensor) { return to_python(e.get()->take_rows(tensor)); },
          py::arg("tensor"), "Ids, 1-d int64, values, 1-d uint8, and SparseTraffic.")
      .def("unready", [](const PyEngine& e) { return e.get()->unready(); })
      .def("end_backward", [](const PyEngine& e) { e.get()->end_backward(); })
      .def(
          "wait",
          [](const PyEngine& e, int tensor, uintptr_t stream) {
            unlocked(e, [&](Engine& engine) { engine.wait(tensor, check_signals, {stream}); });
          },
          py::arg("tensor"), py::arg("stream") = 0)
      .def(
          "wait_reduced",
          [](const PyEngine& e, uintptr_t stream) {
            unlocked(e, [&](Engine& engine) { engine.wait_reduced(check_signals, {stream}); });
          },
          py::arg("stream") = 0)
      .def(
          "release_gathers",
          [](const PyEngine& e, uintptr_t stream) {
            unlocked(e, [&](Engine& engine) { engine.release_gathers({stream}); });
          },
          py::arg("stream") = 0)
      .def(
          "drain",
          [](const PyEngine& e, uintptr_t stream) {
            unlocked(e, [&](Engine& engine) { engine.drain(check_signals, {stream}); });
          },
          py::arg("stream") = 0)
      .def(
          "fail",
          [](const PyEngine& e, const std::string& message) {
            const auto fail = e.get()->fail_callback();
            py::gil_scoped_release free;
            fail(message);
          },
          py::arg("message"))
      .def("close", &PyEngine::close)
      .def_property_readonly("fault", [](const PyEngine& e) { return e.get()->fault(); })
      .def_property_readonly("steps", [](const PyEngine& e) { return e.get()->steps(); })
      .def("status", [](const PyEngine& e) { return e.get()->status(); })
      .def("ready_times",
           [](const PyEngine& e) {
             return unlocked(e, [](Engine& engine) { return engine.ready_times(); });
           })
      .def(
          "op_times",
          [](const PyEngine& e) {
            return unlocked(e, [](Engine& engine) { return engine.op_times(); });
          },
          "(launched, completed) of every op of the current step; 0 where it has not.")
      .def(
          "set_timelines",
          [](const PyEngine& e, std::vector<std::shared_ptr<TimelineWriter>> writers) {
            unlocked(e, [&](Engine& engine) { engine.set_timelines(std::move(writers)); });
          },
          py::arg("writers"))
      .def(
          "record_update",
          [](const PyEngine& e, const std::vector<int>& tensors, double start_s, double end_s) {
            e.get()->record_update(tensors, start_s, end_s);
          },
          py::arg("tensors"), py::arg("start_s"), py::arg("end_s"))
      .def(
          "record_update",
          [](const PyEngine& e, const std::vector<int>& tensors, const Moment& start,
             const Moment& end) { e.get()->record_update(tensors, start, end); },
          py::arg("tensors"), py::arg("start"), py::arg("end"))
      .def(
          "record_pass",
          [](const PyEngine& e, const std::string& name, double start_s, double end_s) {
            e.get()->record_pass(name, start_s, end_s);
          },
          py::arg("name"), py::arg("start_s"), py::arg("end_s"))
      .def(
          "record_pass",
          [](const PyEngine& e, const std::string& name, const Moment& start, const Moment& end) {
            e.get()->record_pass(name, start, end);
          },
          py::arg("name"), py::arg("start"), py::arg("end"));
}

void register_timeline(py::module_& m) {
  m.def("now_s", &now_s, "Seconds on the steady clock, the time base of every measurement.");
  py::class_<TimelineWriter, std::shared_ptr<TimelineWriter>>(
      m, "TimelineWriter", "Writes a Chrome trace; steps is 'A:B', half open.")
      .def(py::init([](const std::string& path, int rank, const std::string& steps) {
             return std::make_shared<TimelineWriter>(path, rank, StepRange::parse(steps));
           }),
           py::arg("path"), py::arg("rank"), py::arg("steps") = "0:")
      .def("describe", &TimelineWriter::describe, py::arg("name"), py::arg("args"),
           "Appends a metadata event; args is a JSON object.");
}

}  // namespace usbyte
