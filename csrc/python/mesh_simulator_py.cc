#include "simulator/mesh_simulator.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {
namespace {

std::vector<std::tuple<int, int, int>> rows(const std::vector<ChunkPhase>& order) {
  std::vector<std::tuple<int, int, int>> out;
  for (const ChunkPhase& at : order) out.emplace_back(at.collective, at.chunk, at.phase);
  return out;
}

}  // namespace

void register_mesh_simulator(py::module_& m) {
  py::class_<MeshCollective>(m, "MeshCollective",
                             "A collective on a mesh, cut into as many chunks as it has routes; "
                             "after: earlier collectives and the seconds after their ends.")
      .def(py::init([](const std::string& kind, double bytes, std::vector<Route> routes,
                       std::vector<int> sizes, double release_s,
                       const std::vector<std::pair<int, double>>& after) {
             MeshCollective out{collective_from_name(kind), bytes,     std::move(routes),
                                std::move(sizes),           release_s, {}};
             for (auto [collective, delay_s] : after) out.after.push_back({collective, delay_s});
             return out;
           }),
           py::arg("kind"), py::arg("bytes"), py::arg("routes"),
           py::arg("sizes") = std::vector<int>{}, py::arg("release_s") = 0.0,
           py::arg("after") = std::vector<std::pair<int, double>>{})
      .def_property_readonly("kind",
                             [](const MeshCollective& c) { return std::string(name(c.kind)); })
      .def_readonly("bytes", &MeshCollective::bytes)
      .def_readonly("routes", &MeshCollective::routes)
      .def_readonly("sizes", &MeshCollective::sizes)
      .def_readonly("release_s", &MeshCollective::release_s)
      .def_property_readonly("after", [](const MeshCollective& c) {
        std::vector<std::pair<int, double>> out;
        for (auto [collective, delay_s] : c.after) out.emplace_back(collective, delay_s);
        return out;
      });
  py::class_<MeshSchedule>(m, "MeshSchedule",
                           "Routes by chunk and, by dimension, the order of (chunk, phase).")
      .def_property_readonly("kind",
                             [](const MeshSchedule& s) { return std::string(name(s.kind)); })
      .def_readonly("routes", &MeshSchedule::routes)
      .def_property_readonly("order",
                             [](const MeshSchedule& s) {
                               std::vector<std::vector<std::pair<int, int>>> out;
                               for (const auto& of_dimension : s.order) {
                                 auto& row = out.emplace_back();
                                 for (const ChunkPhase& at : of_dimension) {
                                   row.emplace_back(at.chunk, at.phase);
                                 }
                               }
                               return out;
                             })
      .def("validate", &MeshSchedule::validate, py::arg("topology"))
      .def("to_json", &MeshSchedule::to_json)
      .def_static("from_json", &MeshSchedule::from_json, py::arg("json"))
      .def("__eq__", &MeshSchedule::operator==);
  py::class_<DimensionUse>(m, "DimensionUse", "What happened to one dimension; seconds, bytes.")
      .def_readonly("busy_s", &DimensionUse::busy_s)
      .def_readonly("startup_s", &DimensionUse::startup_s)
      .def_readonly("moved_bytes", &DimensionUse::moved_bytes)
      .def_property_readonly(
          "order", [](const DimensionUse& use) { return rows(use.order); },
          "(collective, chunk, phase) one after another.");
  py::class_<MeshRun>(m, "MeshRun", "Collectives as predicted; seconds.")
      .def_readonly("finish_s", &MeshRun::finish_s)
      .def_readonly("released_s", &MeshRun::released_s)
      .def_readonly("done_s", &MeshRun::done_s)
      .def_readonly("dimensions", &MeshRun::dimensions)
      .def_readonly("utilization", &MeshRun::utilization)
      .def("schedule", &MeshRun::schedule, py::arg("collective"));
  m.def(
      "simulate_mesh",
      [](const Topology& topology, const std::vector<MeshCollective>& collectives,
         const std::string& queue, bool startups_overlap) {
        return simulate_mesh(topology, collectives,
                             {mesh_queue_from_name(queue), startups_overlap});
      },
      py::arg("topology"), py::arg("collectives"), py::arg("queue") = "fifo",
      py::arg("startups_overlap") = false, py::call_guard<py::gil_scoped_release>(),
      "queue: fifo, or scf for the smallest chunk first.");
  m.def(
      "simulate_schedule",
      [](const Topology& topology, const MeshSchedule& schedule, double bytes) {
        return simulate_schedule(topology, schedule, bytes);
      },
      py::arg("topology"), py::arg("schedule"), py::arg("bytes"),
      "Seconds of a collective of so many bytes by that schedule.");
  m.def(
      "ideal_s",
      [](const Topology& topology, const std::string& kind, double bytes,
         const std::vector<int>& sizes) {
        return ideal_s(topology, collective_from_name(kind), bytes, sizes);
      },
      py::arg("topology"), py::arg("kind"), py::arg("bytes"), py::arg("sizes") = std::vector<int>{},
      "Seconds of a collective if all its dimensions were busy all the time.");
}

}  // namespace usbyte
