// SPDX-License-Identifier: Apache-2.0
#include "json.h"

#include <algorithm>
#include <string>

namespace usbyte {

Json parse_json(std::string_view text, const std::string& what) {
  const std::string culprit = what.empty() ? "" : what + ": ";
  if (text.size() > kMostJsonBytes) {
    throw UsageError(culprit + "a text of " + std::to_string(text.size()) + " bytes, at most " +
                     std::to_string(kMostJsonBytes) + " are read");
  }
  using Event = Json::parse_event_t;
  const auto check = [&](int depth, Event event, const Json&) {
    const bool opens = event == Event::array_start || event == Event::object_start;
    if (opens && depth >= kMostJsonDepth) {
      throw UsageError(culprit + "lists and objects inside each other, more than " +
                       std::to_string(kMostJsonDepth) + " deep");
    }
    return true;
  };
  return Json::parse(text, check);
}

std::string shown(const Json& value) {
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 40);
}

TensorSpec tensor_of(const Json& row, int64_t offset) {
  TensorSpec spec{row.at("name").get<std::string>(),
                  whole<int64_t>(row, "numel"),
                  dtype_from_name(row.at("dtype").get<std::string>()),
                  offset,
                  whole<int64_t>(row, "rows", 1),
                  whole<int64_t>(row, "width", 0)};
  const auto refuse = [&](const std::string& what) {
    throw UsageError("tensor '" + spec.name + "': " + what);
  };
  if (spec.numel < 0 || spec.rows < 1 || spec.width < 0) refuse("a size is negative, or no rows");
  if (spec.numel > kMostElements - offset) {
    refuse(std::to_string(spec.numel) + " elements behind " + std::to_string(offset) +
           " are too many");
  }
  if (spec.rows > kMostElements / std::max(spec.width, int64_t{1})) {
    refuse(std::to_string(spec.rows) + " rows of " + std::to_string(spec.width) + " are too many");
  }
  return spec;
}

}  // namespace usbyte
