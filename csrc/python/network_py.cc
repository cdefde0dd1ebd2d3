// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "usbyte/codec_costs.h"
#include "usbyte/error.h"
#include "usbyte/network.h"

namespace py = pybind11;

namespace usbyte {

namespace {

std::vector<Sample> rows(const std::vector<std::pair<int64_t, double>>& samples) {
  std::vector<Sample> out;
  for (auto [bytes, seconds] : samples) out.push_back({bytes, seconds});
  return out;
}

}  // namespace

void register_network(py::module_& m) {
  py::class_<AlphaBeta>(m, "AlphaBeta",
                        "Cost of one op of m bytes: alpha_s + beta_s_per_byte * m, or less where "
                        "bytes already travel during the last overlap_s of the startup: "
                        "max(alpha_s, alpha_s - overlap_s + beta_s_per_byte * m).")
      .def(py::init<double, double, double>(), py::arg("alpha_s") = 0.0,
           py::arg("beta_s_per_byte") = 0.0, py::arg("overlap_s") = 0.0)
      .def_readonly("alpha_s", &AlphaBeta::alpha_s)
      .def_readonly("beta_s_per_byte", &AlphaBeta::beta_s_per_byte)
      .def_readonly("overlap_s", &AlphaBeta::overlap_s)
      .def("time_s", &AlphaBeta::time_s, py::arg("bytes"))
      .def("__eq__", &AlphaBeta::operator==)
      .def("__repr__", [](const AlphaBeta& c) {
        return "AlphaBeta(alpha_s=" + std::to_string(c.alpha_s) +
               ", ns_per_byte=" + std::to_string(c.beta_s_per_byte * 1e9) +
               ", overlap_s=" + std::to_string(c.overlap_s) + ")";
      });
  py::class_<OneShot>(m, "OneShot",
                      "Small all_reduces in one round of messages, on connections of their own: "
                      "latency_s for one, busy_latency_s at least while an op is in flight that "
                      "does not go this way, and gap_s between the ends of two.")
      .def(py::init<int64_t, double, double, double>(), py::arg("most_bytes") = 0,
           py::arg("latency_s") = 0.0, py::arg("gap_s") = 0.0, py::arg("busy_latency_s") = 0.0)
      .def_readonly("most_bytes", &OneShot::most_bytes)
      .def_readonly("latency_s", &OneShot::latency_s)
      .def_readonly("gap_s", &OneShot::gap_s)
      .def_readonly("busy_latency_s", &OneShot::busy_latency_s)
      .def("__eq__", &OneShot::operator==);
  using Costs = std::vector<AlphaBeta>;
  py::class_<NetworkModel>(m, "NetworkModel",
                           "What the network costs, on the path of training: for each collective "
                           "its cost with 1, 2, ... ops in flight.")
      .def(py::init([](int ranks, Costs all_reduce, Costs reduce_scatter, Costs all_gather,
                       int concurrent, double busy_alpha_s, double pack_s_per_byte,
                       OneShot one_shot, std::optional<Topology> topology) {
             NetworkModel model{ranks,
                                std::move(all_reduce),
                                std::move(reduce_scatter),
                                std::move(all_gather),
                                concurrent,
                                busy_alpha_s,
                                pack_s_per_byte,
                                one_shot,
                                std::move(topology)};
             model.validate();
             return model;
           }),
           py::arg("ranks"), py::arg("all_reduce"), py::arg("reduce_scatter") = Costs{},
           py::arg("all_gather") = Costs{}, py::arg("concurrent") = 0,
           py::arg("busy_alpha_s") = 0.0, py::arg("pack_s_per_byte") = 0.0,
           py::arg("one_shot") = OneShot{}, py::arg("topology") = std::nullopt)
      .def_readonly("ranks", &NetworkModel::ranks)
      .def_readonly("all_reduce", &NetworkModel::all_reduce)
      .def_readonly("reduce_scatter", &NetworkModel::reduce_scatter)
      .def_readonly("all_gather", &NetworkModel::all_gather)
      .def_readonly("concurrent", &NetworkModel::concurrent,
                    "How many ops run at once; 0: any number.")
      .def_readonly("busy_alpha_s", &NetworkModel::busy_alpha_s,
                    "Seconds that an op takes at least while bytes of other ops flow.")
      .def_readonly(
          "pack_s_per_byte", &NetworkModel::pack_s_per_byte,
          "Seconds per byte to pack an all_reduce of several blocks and to put them back.")
      .def_readonly("one_shot", &NetworkModel::one_shot)
      .def_readonly("topology", &NetworkModel::topology,
                    "Its dimensions, through which all_reduces may be routed; None without.")
      .def(
          "cost",
          [](const NetworkModel& model, const std::string& kind, int in_flight) {
            if (in_flight < 1) throw UsageError("network: a cost of fewer than 1 op in flight");
            return model.cost(collective_from_name(kind), in_flight);
          },
          py::arg("kind"), py::arg("in_flight") = 1)
      .def(
          "with_topology",
          [](NetworkModel model, std::optional<Topology> topology) {
            model.topology = std::move(topology);
            model.validate();
            return model;
          },
          py::arg("topology"), "The same with other dimensions, or without.")
      .def("scaled", &NetworkModel::scaled, py::arg("alpha"), py::arg("beta"),
           "The same with startups, shots too, and bytes that many times as long.")
      .def_static("ring", &NetworkModel::ring, py::arg("ranks"), py::arg("latency_s"),
                  py::arg("bytes_per_s"), py::arg("concurrent") = 0,
                  "Ring collectives over links of that speed.")
      .def("to_json", &NetworkModel::to_json)
      .def_static("from_json", &NetworkModel::from_json, py::arg("json"))
      .def("__eq__", &NetworkModel::operator==);
  m.def(
      "fit_cost",
      [](const std::vector<std::pair<int64_t, double>>& s) {
        const Fit fit = fit_cost(rows(s));
        return std::pair(fit.cost, fit.residual);
      },
      py::arg("samples"),
      "Cost from repeated measurements of several sizes, and the median of its relative errors.");
}

void register_codec_costs(py::module_& m) {
  py::class_<CodecCost>(m, "CodecCost",
                        "What a codec costs by bytes of float32 gradients: encoding, and decoding "
                        "a message, of an op one by one or all at once.")
      .def(py::init<AlphaBeta, AlphaBeta, bool, double>(), py::arg("encode") = AlphaBeta{},
           py::arg("decode") = AlphaBeta{}, py::arg("at_once") = false,
           py::arg("further_s_per_byte") = 0.0)
      .def_readonly("encode", &CodecCost::encode)
      .def_readonly("decode", &CodecCost::decode)
      .def_readonly("at_once", &CodecCost::at_once)
      .def_readonly("further_s_per_byte", &CodecCost::further_s_per_byte)
      .def("__eq__", &CodecCost::operator==);
  py::class_<CodecCosts>(m, "CodecCosts", "The costs of codecs on one machine, by spec.")
      .def(py::init([](const std::map<std::string, CodecCost>& by_spec, double row_s) {
             CodecCosts costs{{}, row_s};
             costs.by_spec.insert(by_spec.begin(), by_spec.end());
             return CodecCosts::from_json(costs.to_json());
           }),
           py::arg("by_spec") = std::map<std::string, CodecCost>{}, py::arg("row_s") = 0.0)
      .def_readonly("row_s", &CodecCosts::row_s)
      .def_property_readonly("specs",
                             [](const CodecCosts& costs) {
                               std::vector<std::string> out;
                               for (const auto& [spec, unused] : costs.by_spec) out.push_back(spec);
                               return out;
                             })
      .def("of", &CodecCosts::of, py::arg("spec"), "Of a spec; \"none\" is free.")
      .def("to_json", &CodecCosts::to_json)
      .def_static("from_json", &CodecCosts::from_json, py::arg("json"))
      .def("__eq__", &CodecCosts::operator==);
}

}  // namespace usbyte
