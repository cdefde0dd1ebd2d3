#include "usbyte/policy.h"

#include <pybind11/stl.h>

#include "bindings.h"

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
  m.def("policies", [] {
    std::vector<std::string> names;
    for (const auto& [key, unused] : policies()) names.push_back(key);
    return names;
  });
}

}  // namespace usbyte
