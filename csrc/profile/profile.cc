// SPDX-License-Identifier: Apache-2.0
#include "usbyte/profile.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "plan/json.h"
#include "usbyte/error.h"

namespace usbyte {

using nlohmann::ordered_json;

std::string_view name(Overlap overlap) {
  return overlap == Overlap::forward ? "forward" : "backward";
}

Overlap overlap_from_name(std::string_view text) {
  for (Overlap overlap : {Overlap::backward, Overlap::forward}) {
    if (text == name(overlap)) return overlap;
  }
  throw UsageError("unknown overlap '" + std::string(text) + "'; known are backward, forward");
}

double Profile::backward_end_s() const {
  return ready_s.empty() ? 0 : *std::max_element(ready_s.begin(), ready_s.end());
}

int64_t Profile::bytes() const {
  int64_t sum = 0;
  for (const TensorSpec& t : tensors) sum += t.numel * itemsize(t.dtype);
  return sum;
}

void Profile::validate() const {
  const size_t n = tensors.size();
  if (need_s.size() != n || ready_s.size() != n) {
    throw PlanError("profile: " + std::to_string(n) + " tensors, but " +
                    std::to_string(need_s.size()) + " need times and " +
                    std::to_string(ready_s.size()) + " ready times");
  }
  for (const auto* spread : {&need_spread_s, &ready_spread_s}) {
    if (!spread->empty() && spread->size() != n) {
      throw PlanError("profile: " + std::to_string(n) + " tensors, but " +
                      std::to_string(spread->size()) + " spreads");
    }
  }
  if (!std::isfinite(step_s) || !std::isfinite(update_s) || step_s < 0 || update_s < 0) {
    throw PlanError("profile: step_s or update_s is negative or not finite");
  }
  int64_t end = 0;
  for (size_t i = 0; i < n; ++i) {
    const TensorSpec& t = tensors[i];
    if (t.sparse() ? t.numel != 0 : t.numel <= 0) {
      throw PlanError("profile: tensor '" + t.name + "' is empty, or sparse with elements");
    }
    if (t.offset != end) {
      throw PlanError("profile: tensor '" + t.name + "' is not contiguous");
    }
    end = t.end();
    if (!std::isfinite(need_s[i]) || !std::isfinite(ready_s[i]) || need_s[i] < 0 ||
        ready_s[i] < 0) {
      throw PlanError("profile: tensor '" + t.name + "' has a time that is negative or not finite");
    }
    if (step_s > 0 && std::max(need_s[i], ready_s[i]) > step_s) {
      throw PlanError("profile: tensor '" + t.name + "' has a time after the end of the step");
    }
  }
}

std::string Profile::to_json() const {
  ordered_json rows = ordered_json::array();
  for (size_t i = 0; i < tensors.size(); ++i) {
    rows.push_back({{"name", tensors[i].name},
                    {"numel", tensors[i].numel},
                    {"dtype", name(tensors[i].dtype)},
                    {"need_s", need_s[i]},
                    {"ready_s", ready_s[i]}});
    if (tensors[i].rows != 1) rows.back()["rows"] = tensors[i].rows;
    if (tensors[i].sparse()) rows.back()["width"] = tensors[i].width;
    if (!need_spread_s.empty()) rows.back()["need_spread_s"] = need_spread_s[i];
    if (!ready_spread_s.empty()) rows.back()["ready_spread_s"] = ready_spread_s[i];
  }
  return ordered_json{{"format", "usbyte-profile-1"},
                      {"model", model},
                      {"step_s", step_s},
                      {"update_s", update_s},
                      {"tensors", std::move(rows)}}
      .dump(1);
}

Profile Profile::from_json(std::string_view json) {
  try {
    const Json root = parse_json(json);
    if (root.at("format") != "usbyte-profile-1") throw PlanError("profile: unknown format");
    Profile p;
    p.step_s = root.at("step_s").get<double>();
    p.update_s = root.value("update_s", 0.0);
    p.model = root.value("model", "");
    int64_t offset = 0;
    for (const auto& row : root.at("tensors")) {
      p.tensors.push_back(tensor_of(row, offset));
      offset = p.tensors.back().end();
      p.need_s.push_back(row.at("need_s").get<double>());
      p.ready_s.push_back(row.at("ready_s").get<double>());
      if (row.contains("need_spread_s")) p.need_spread_s.push_back(row["need_spread_s"]);
      if (row.contains("ready_spread_s")) p.ready_spread_s.push_back(row["ready_spread_s"]);
    }
    p.validate();
    return p;
  } catch (const ordered_json::exception& e) {
    throw PlanError(std::string("profile: malformed JSON: ") + e.what());
  } catch (const UsageError& e) {
    throw PlanError(std::string("profile: ") + e.what());
  }
}

std::vector<double> due_times(const Profile& profile, Overlap overlap) {
  const size_t n = profile.tensors.size();
  if (overlap == Overlap::backward) return std::vector<double>(n, profile.backward_end_s());
  std::vector<double> due(n);
  const double begin = profile.iteration_s() - profile.update_s;
  const double update_s_per_byte = n ? profile.update_s / static_cast<double>(profile.bytes()) : 0;
  double updated = 0, module_s = 0, need_s = 0;
  for (int i : forward_order(profile)) {
    const size_t t = static_cast<size_t>(i);
    const TensorSpec& spec = profile.tensors[t];
    if (profile.need_s[t] != need_s) {  // what a module needs is updated together
      updated += module_s;
      module_s = 0;
      need_s = profile.need_s[t];
    }
    due[t] = begin + need_s + updated;
    module_s += update_s_per_byte * static_cast<double>(spec.numel * itemsize(spec.dtype));
  }
  return due;
}

std::vector<int> forward_order(const Profile& profile) {
  std::vector<int> order(profile.tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return profile.need_s[static_cast<size_t>(a)] < profile.need_s[static_cast<size_t>(b)];
  });
  return order;
}

std::vector<int> backward_order(const Profile& profile) {
  std::vector<int> order(profile.tensors.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return profile.ready_s[static_cast<size_t>(a)] < profile.ready_s[static_cast<size_t>(b)];
  });
  return order;
}

}  // namespace usbyte
