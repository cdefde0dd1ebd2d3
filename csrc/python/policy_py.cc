// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "plan/dimension_path.h"
#include "policy/espresso/select.h"
#include "policy/espresso/timeline.h"
#include "policy/transforms/adatopk.h"
#include "policy/transforms/routing.h"
#include "usbyte/policy.h"

namespace py = pybind11;

namespace usbyte {

void register_policy(py::module_& m) {
  m.def(
      "make_plan",
      [](const std::string& policy, const Profile& profile, const NetworkModel& network,
         const std::map<std::string, int64_t>& options, const std::string& overlap, bool sharded,
         const std::vector<std::string>& codecs, const CodecCosts& codec_costs) {
        PolicyOptions o;
        o.codec_of = codecs;
        o.codec_costs = codec_costs;
        o.overlap = overlap_from_name(overlap);
        o.sharded = sharded;
        const std::map<std::string, int64_t*> fields = {
            {"bucket_bytes", &o.bucket_bytes},       {"first_bucket_bytes", &o.first_bucket_bytes},
            {"partition_bytes", &o.partition_bytes}, {"credit_bytes", &o.credit_bytes},
            {"unit_bytes", &o.unit_bytes},           {"fusion_bytes", &o.fusion_bytes}};
        for (const auto& [key, value] : options) {
          auto it = fields.find(key);
          if (it == fields.end()) {
            throw py::type_error("make_plan() got an unexpected option '" + key + "'");
          }
          *it->second = value;
        }
        py::gil_scoped_release free;
        return make_plan(policy, profile, network, o);
      },
      py::arg("policy"), py::arg("profile"), py::arg("network"),
      py::arg("options") = std::map<std::string, int64_t>{}, py::arg("overlap") = "forward",
      py::arg("sharded") = false, py::arg("codecs") = std::vector<std::string>{},
      py::arg("codec_costs") = CodecCosts{},
      "Plan of the policy of that name; options in bytes: bucket_bytes, first_bucket_bytes, "
      "partition_bytes, credit_bytes, unit_bytes, fusion_bytes. Codecs: what each tensor travels "
      "by; codec_costs: of those.");
  m.def("policy_name", &policy_name, py::arg("name"),
        "The name by which a policy is shown: 'us-byte' for its former name 'usbyte'.");
  m.def("policies", [] {
    std::vector<std::string> names;
    for (const auto& [key, unused] : policies()) names.push_back(key);
    return names;
  });
  m.def("sharding_policies", &sharding_policies,
        "Names of the policies that plan for sharded optimizers, in alphabetical order.");
}

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

void register_adatopk(py::module_& m) {
  m.def(
      "adatopk_ratios",
      [](const std::vector<double>& predicted_s, double least_ratio, double most_ratio) {
        return adatopk_ratios(predicted_s, least_ratio, most_ratio);
      },
      py::arg("predicted_s"), py::arg("least_ratio"), py::arg("most_ratio") = 1.0,
      "Shares to keep by link or tensor, smallest where sending takes longest (FusionLLM).");
  m.def(
      "adatopk_codecs",
      [](const std::vector<double>& predicted_s, double least_ratio, double most_ratio) {
        return adatopk_codecs(predicted_s, least_ratio, most_ratio);
      },
      py::arg("predicted_s"), py::arg("least_ratio"), py::arg("most_ratio") = 1.0,
      "The same as codecs: 'topk:RATIO', or 'none' where that does not pay.");
}

void register_routes(py::module_& m) {
  m.def("best_route", &best_route, py::arg("topology"), py::arg("bytes"),
        "The fastest of route_choices for an all_reduce, over several numbers of chunks.");
  m.def("fixed_route", &fixed_route, py::arg("topology"), py::arg("bytes"),
        "The fastest with the innermost dimension first for every chunk.");
  m.def("with_routes", &with_routes, py::arg("plan"), py::arg("network"),
        "The same plan with routes for all_reduces that are predicted to gain by them.");
  py::class_<DimensionPath>(m, "DimensionPath",
                            "How an all_reduce goes along two dimensions; see dimension_path.h.")
      .def(
          py::init([](int sum_dimension, std::string scatter, std::string sum, std::string gather) {
            return DimensionPath{sum_dimension, std::move(scatter), std::move(sum),
                                 std::move(gather)};
          }),
          py::arg("sum_dimension"), py::arg("scatter") = "none", py::arg("sum") = "none",
          py::arg("gather") = "none")
      .def_readonly("sum_dimension", &DimensionPath::sum_dimension)
      .def_readonly("scatter", &DimensionPath::scatter)
      .def_readonly("sum", &DimensionPath::sum)
      .def_readonly("gather", &DimensionPath::gather);
  m.def("dimension_paths", &dimension_paths, py::arg("op"), py::arg("mesh"),
        "Dimension paths of an op; see routing.h.");
  m.def(
      "along_dimensions",
      [](const Plan& plan, const Topology& mesh,
         const std::vector<std::optional<DimensionPath>>& paths) {
        return along_dimensions(plan, mesh, paths);
      },
      py::arg("plan"), py::arg("mesh"), py::arg("paths"),
      "The same plan where ops, in order, go these paths; see dimension_path.h.");
  m.def("dimension_codecs", &dimension_codecs, py::arg("codec"), py::arg("mesh"),
        "Specs of codecs that ops with this one may have on dimension paths.");
  m.def(
      "with_dimension_paths",
      [](const Plan& plan, const Profile& profile, const NetworkModel& network,
         const std::string& overlap, const CodecCosts& costs) {
        return with_dimension_paths(plan, profile, network, overlap_from_name(overlap), costs);
      },
      py::arg("plan"), py::arg("profile"), py::arg("network"), py::arg("overlap"), py::arg("costs"),
      py::call_guard<py::gil_scoped_release>(),
      "The same plan where each op with a codec goes along two dimensions, by codecs in one or "
      "both, if that is predicted to be faster; see routing.h.");
  m.def("routed_network", &routed_network, py::arg("network"),
        "What the network costs whose all_reduces are all routed.");
}

}  // namespace usbyte
