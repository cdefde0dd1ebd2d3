#include "policy/espresso/select.h"
#include "policy/espresso/timeline.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace usbyte {
namespace {

using Costs = std::optional<CodecCosts>;
using Texts = std::vector<std::string>;

std::vector<Strategy> parsed(const Texts& texts) {
  std::vector<Strategy> out;
  for (const std::string& text : texts) out.push_back(Strategy::parse(text));
  return out;
}

Texts described(const std::vector<Strategy>& strategies) {
  Texts out;
  for (const Strategy& strategy : strategies) out.push_back(strategy.describe());
  return out;
}

}  // namespace

void register_bytecomp(py::module_& m) {
  py::class_<CompressionCluster>(m, "CompressionCluster",
                                 "Ranks, links and codec costs; gpu and cpu are (encode, decode) "
                                 "by codec of one rank, or None "
                                 "where codecs cannot run there.")
      .def_static("of", &CompressionCluster::of, py::arg("network"), py::arg("gpu") = Costs{},
                  py::arg("cpu") = Costs{}, "One level with the costs of a network.")
      .def_static("thakur", &CompressionCluster::thakur, py::arg("nodes"),
                  py::arg("ranks_per_node"), py::arg("intra_latency_s"),
                  py::arg("intra_bytes_per_s"), py::arg("inter_latency_s"),
                  py::arg("inter_bytes_per_s"), py::arg("gpu") = Costs{}, py::arg("cpu") = Costs{},
                  "Textbook costs of collectives inside and between nodes.")
      .def_readonly("nodes", &CompressionCluster::nodes)
      .def_readonly("ranks_per_node", &CompressionCluster::ranks_per_node)
      .def_property_readonly("ranks", &CompressionCluster::ranks);
  py::class_<CompressionJob>(m, "CompressionJob",
                             "Gradients in the order in which backward produces them; tensors are "
                             "(elements, dtype, seconds until ready, codec).")
      .def(py::init(
               [](const std::vector<std::tuple<int64_t, std::string, double, std::string>>& rows,
                  double rest_s) {
                 CompressionJob job;
                 job.rest_s = rest_s;
                 for (const auto& [numel, dtype, ready_s, codec] : rows) {
                   job.tensors.push_back({numel, dtype_from_name(dtype), ready_s, rest_s, codec});
                 }
                 return job;
               }),
           py::arg("tensors"), py::arg("rest_s") = 0.0)
      .def_static(
          "of",
          [](const Profile& profile, const std::string& overlap, const Texts& codec_of) {
            return CompressionJob::of(profile, overlap_from_name(overlap), codec_of);
          },
          py::arg("profile"), py::arg("overlap") = "backward", py::arg("codec_of") = Texts{},
          "Of a profile; codec_of by tensor of the profile.")
      .def_property_readonly(
          "tensors",
          [](const CompressionJob& job) {
            std::vector<std::tuple<int64_t, std::string, double, std::string>> out;
            for (const auto& t : job.tensors) {
              out.emplace_back(t.numel, name(t.dtype), t.ready_s, t.codec);
            }
            return out;
          })
      .def_readonly("rest_s", &CompressionJob::rest_s);
  py::class_<StrategySelection>(
      m, "StrategySelection", "What select_strategies found; strategies are by tensor of the job.")
      .def_property_readonly("strategies",
                             [](const StrategySelection& s) { return described(s.strategies); })
      .def_readonly("iteration_s", &StrategySelection::iteration_s)
      .def_readonly("uncompressed_s", &StrategySelection::uncompressed_s)
      .def_readonly("greedy_s", &StrategySelection::greedy_s, "After algorithm 1.")
      .def_readonly("offloaded_s", &StrategySelection::offloaded_s, "After algorithms 1 and 2.")
      .def_readonly("simulated", &StrategySelection::simulated, "Tasks.");
  m.def(
      "decision_tree",
      [](const CompressionCluster& cluster) { return described(decision_tree(cluster)); },
      py::arg("cluster"), "Every strategy of the cluster, as text: 'C[gpu] AG D[cpu]'.");
  m.def(
      "compressed_iteration_s",
      [](const CompressionJob& job, const CompressionCluster& cluster, const Texts& strategies) {
        return iteration_s(job, cluster, parsed(strategies));
      },
      py::arg("job"), py::arg("cluster"), py::arg("strategies"),
      "Seconds of an iteration in which each tensor takes its strategy.");
  m.def(
      "select_strategies",
      [](const CompressionJob& job, const CompressionCluster& cluster, const Texts& allowed) {
        const std::vector<Strategy> strategies = parsed(allowed);
        py::gil_scoped_release free;
        return select_strategies(job, cluster, strategies);
      },
      py::arg("job"), py::arg("cluster"), py::arg("allowed") = Texts{},
      "A strategy for each tensor, of those allowed or, if none are, of the decision tree.");
}

}  // namespace usbyte
