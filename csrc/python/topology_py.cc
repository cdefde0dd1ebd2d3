// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "simulator/mesh_simulator.h"
#include "topology/themis.h"
#include "usbyte/topology.h"

namespace py = pybind11;

namespace usbyte {

void register_topology(py::module_& m) {
  py::class_<Dimension>(m, "Dimension",
                        "One dimension of a network: links among ranks that differ in one "
                        "coordinate. bytes_per_s: that a rank can send, and at the same time "
                        "receive; latency_s: of one step; kind: ring, fully_connected or switched.")
      .def(py::init([](std::string name, int size, double bytes_per_s, double latency_s,
                       const std::string& kind, bool in_network_reduction) {
             return Dimension{
                 std::move(name),     size, bytes_per_s, latency_s, dimension_kind_from_name(kind),
                 in_network_reduction};
           }),
           py::arg("name"), py::arg("size"), py::arg("bytes_per_s"), py::arg("latency_s") = 0.0,
           py::arg("kind") = "ring", py::arg("in_network_reduction") = false)
      .def_readonly("name", &Dimension::name)
      .def_readonly("size", &Dimension::size)
      .def_readonly("bytes_per_s", &Dimension::bytes_per_s)
      .def_readonly("latency_s", &Dimension::latency_s)
      .def_property_readonly("kind", [](const Dimension& d) { return std::string(name(d.kind)); })
      .def_readonly("in_network_reduction", &Dimension::in_network_reduction)
      .def_property_readonly("steps", &Dimension::steps)
      .def_property_readonly("startup_s", &Dimension::startup_s)
      .def("moved_bytes", &Dimension::moved_bytes, py::arg("bytes"), py::arg("of_all_reduce"),
           "Bytes that a rank sends in a phase whose vector has `bytes` where it is whole.")
      .def("exchanged_bytes", &Dimension::exchanged_bytes, py::arg("bytes"),
           "Bytes that a rank sends in an all_to_all of `bytes`; around a ring they are passed on.")
      .def("__eq__", &Dimension::operator==);
  py::class_<Topology>(m, "Topology",
                       "A network of several dimensions, the innermost first; "
                       "rank = c0 + c1 * P0 + c2 * P0 * P1 + ...")
      .def(py::init([](std::vector<Dimension> dimensions) {
             Topology topology{std::move(dimensions)};
             topology.validate();
             return topology;
           }),
           py::arg("dimensions"))
      .def_readonly("dimensions", &Topology::dimensions)
      .def_property_readonly("ranks", &Topology::ranks)
      .def_property_readonly("bytes_per_s", &Topology::bytes_per_s)
      .def("coordinates", &Topology::coordinates, py::arg("rank"))
      .def("rank", &Topology::rank, py::arg("coordinates"))
      .def("axis_group", &Topology::axis_group, py::arg("rank"), py::arg("dimension"))
      .def("among", &Topology::among, py::arg("sizes"),
           "As a collective among sizes[d] ranks of each axis group sees it.")
      .def("to_json", &Topology::to_json)
      .def_static("from_json", &Topology::from_json, py::arg("json"))
      .def("__eq__", &Topology::operator==);
  py::class_<MeshPhase>(m, "MeshPhase", "One phase of a chunk; see topology.h.")
      .def_readonly("dimension", &MeshPhase::dimension)
      .def_property_readonly("kind", [](const MeshPhase& p) { return std::string(name(p.kind)); })
      .def_readonly("bytes", &MeshPhase::bytes)
      .def_readonly("moved_bytes", &MeshPhase::moved_bytes)
      .def_readonly("startup_s", &MeshPhase::startup_s)
      .def_readonly("transfer_s", &MeshPhase::transfer_s)
      .def_property_readonly("seconds", &MeshPhase::seconds);
  m.def(
      "mesh_phases",
      [](const Topology& topology, const std::string& kind, const Route& route, double bytes) {
        return mesh_phases(topology, collective_from_name(kind), route, bytes);
      },
      py::arg("topology"), py::arg("kind"), py::arg("route"), py::arg("bytes"),
      "Phases of a chunk, in the order in which it walks them.");
}

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

void register_themis(py::module_& m) {
  const ThemisOptions usual;
  const std::string latency(name(usual.latency));
  py::class_<TwoDimensionShare>(m, "TwoDimensionShare", "Of two dimensions, without startups.")
      .def_readonly("inner_first", &TwoDimensionShare::inner_first)
      .def_readonly("gains", &TwoDimensionShare::gains)
      .def_readonly("gain", &TwoDimensionShare::gain);
  py::class_<MeshChoice>(m, "MeshChoice", "A way to carry out a collective; seconds.")
      .def_readonly("name", &MeshChoice::name)
      .def_readonly("schedule", &MeshChoice::schedule)
      .def_readonly("seconds", &MeshChoice::seconds)
      .def_readonly("fixed_s", &MeshChoice::fixed_s)
      .def_readonly("ideal_s", &MeshChoice::ideal_s);
  m.def("fixed_routes", &fixed_routes, py::arg("topology"), py::arg("chunks"),
        "Innermost dimension first for all chunks.");
  m.def(
      "themis_routes",
      [](const Topology& topology, const std::string& kind, double bytes, int chunks,
         const std::string& counted, double threshold_divisor) {
        return themis_routes(topology, collective_from_name(kind), bytes, chunks,
                             {themis_latency_from_name(counted), threshold_divisor});
      },
      py::arg("topology"), py::arg("kind"), py::arg("bytes"), py::arg("chunks"),
      py::arg("latency") = latency, py::arg("threshold_divisor") = usual.threshold_divisor,
      "Routes by Themis' greedy rule. latency: each_phase, once or original (none).");
  m.def(
      "route_loads_s",
      [](const Topology& topology, const std::string& kind, double bytes,
         const std::vector<Route>& routes, const std::string& counted) {
        return route_loads_s(topology, collective_from_name(kind), bytes, routes,
                             {themis_latency_from_name(counted)});
      },
      py::arg("topology"), py::arg("kind"), py::arg("bytes"), py::arg("routes"),
      py::arg("latency") = latency, "Seconds of reduce_scatter phases, by dimension.");
  m.def("two_dimension_share", &two_dimension_share, py::arg("topology"),
        "The best share of bytes that goes through the inner dimension first.");
  m.def(
      "chosen_routes",
      [](const Topology& topology, const std::string& kind, double bytes, int chunks,
         const std::string& counted, double threshold_divisor, bool startups_overlap) {
        return chosen_routes(topology, collective_from_name(kind), bytes, chunks,
                             {themis_latency_from_name(counted), threshold_divisor},
                             {MeshQueue::fifo, startups_overlap});
      },
      py::arg("topology"), py::arg("kind"), py::arg("bytes"), py::arg("chunks"),
      py::arg("latency") = latency, py::arg("threshold_divisor") = usual.threshold_divisor,
      py::arg("startups_overlap") = false,
      "The fastest of the fixed order, Themis with fifo, and with the smallest chunk first.");
}

}  // namespace usbyte
