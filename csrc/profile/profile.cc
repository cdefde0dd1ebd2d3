#include "usbyte/profile.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "usbyte/error.h"

namespace usbyte {

using nlohmann::ordered_json;

void Profile::validate() const {
  const size_t n = tensors.size();
  if (need_s.size() != n || ready_s.size() != n) {
    throw PlanError("profile: " + std::to_string(n) + " tensors, but " +
                    std::to_string(need_s.size()) + " need times and " +
                    std::to_string(ready_s.size()) + " ready times");
  }
  int64_t end = 0;
  for (size_t i = 0; i < n; ++i) {
    const TensorSpec& t = tensors[i];
    if (t.numel <= 0 || t.offset != end) {
      throw PlanError("profile: tensor '" + t.name + "' is empty or not contiguous");
    }
    end = t.end();
    if (!std::isfinite(need_s[i]) || !std::isfinite(ready_s[i]) || need_s[i] < 0 ||
        ready_s[i] < 0) {
      throw PlanError("profile: tensor '" + t.name + "' has a time that is negative or not finite");
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
  }
  return ordered_json{
      {"format", "usbyte-profile-1"}, {"step_s", step_s}, {"tensors", std::move(rows)}}
      .dump();
}

Profile Profile::from_json(std::string_view json) {
  try {
    const ordered_json root = ordered_json::parse(json);
    if (root.at("format") != "usbyte-profile-1") throw PlanError("profile: unknown format");
    Profile p;
    p.step_s = root.at("step_s").get<double>();
    int64_t offset = 0;
    for (const auto& row : root.at("tensors")) {
      p.tensors.push_back({row.at("name").get<std::string>(), row.at("numel").get<int64_t>(),
                           dtype_from_name(row.at("dtype").get<std::string>()), offset});
      offset = p.tensors.back().end();
      p.need_s.push_back(row.at("need_s").get<double>());
      p.ready_s.push_back(row.at("ready_s").get<double>());
    }
    p.validate();
    return p;
  } catch (const ordered_json::exception& e) {
    throw PlanError(std::string("profile: malformed JSON: ") + e.what());
  } catch (const UsageError& e) {
    throw PlanError(std::string("profile: ") + e.what());
  }
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
