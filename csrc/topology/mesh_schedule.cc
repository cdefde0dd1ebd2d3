// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <string>

#include "plan/json.h"
#include "usbyte/error.h"
#include "usbyte/topology.h"

namespace usbyte {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kFormat = "usbyte-mesh-schedule-1";

std::string what(const ChunkPhase& at) {
  return "phase " + std::to_string(at.phase) + " of chunk " + std::to_string(at.chunk);
}

const ordered_json& array(const ordered_json& value) {
  if (!value.is_array()) throw UsageError("mesh schedule: " + shown(value) + " is no list");
  return value;
}

// Numbers that do not fit would wrap around to some that do.
int index(const ordered_json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > std::numeric_limits<int>::max()) {
    throw UsageError("mesh schedule: " + shown(value) + " is no index");
  }
  return value.get<int>();
}

}  // namespace

void MeshSchedule::validate(const Topology& topology) const {
  topology.validate();
  if (order.size() != topology.dimensions.size()) {
    throw UsageError("mesh schedule: orders of " + std::to_string(order.size()) +
                     " dimensions for " + std::to_string(topology.dimensions.size()));
  }
  if (routes.empty()) throw UsageError("mesh schedule: no routes, so no chunks");
  std::vector<std::vector<MeshPhase>> phases;
  size_t all = 0;
  for (const Route& route : routes) {
    phases.push_back(mesh_phases(topology, kind, route, 0));
    all += phases.back().size();
  }
  size_t listed = 0;
  for (size_t d = 0; d < order.size(); ++d) {
    listed += order[d].size();
    for (const ChunkPhase& at : order[d]) {
      if (at.collective != 0 || at.chunk < 0 || at.chunk >= std::ssize(phases) || at.phase < 0 ||
          at.phase >= std::ssize(phases[static_cast<size_t>(at.chunk)])) {
        throw UsageError("mesh schedule: there is no " + what(at));
      }
      const auto& way = phases[static_cast<size_t>(at.chunk)];
      if (way[static_cast<size_t>(at.phase)].dimension != static_cast<int>(d)) {
        throw UsageError("mesh schedule: " + what(at) + " is not of dimension " +
                         std::to_string(d));
      }
    }
  }
  if (listed != all) {
    throw UsageError("mesh schedule: " + std::to_string(listed) + " phases are listed, and not " +
                     std::to_string(all));
  }
  // Carrying it out finds repeated phases as well: what they stand for is missing then.
  std::vector<int> next(phases.size());     // phase, by chunk
  std::vector<size_t> taken(order.size());  // phases, by dimension
  for (size_t done = 0; done < all;) {
    const size_t before = done;
    for (size_t d = 0; d < order.size(); ++d) {
      for (; taken[d] < order[d].size(); ++taken[d], ++done) {
        const ChunkPhase& at = order[d][taken[d]];
        if (next[static_cast<size_t>(at.chunk)] != at.phase) break;
        ++next[static_cast<size_t>(at.chunk)];
      }
    }
    if (done > before) continue;
    for (size_t d = 0; d < order.size(); ++d) {
      if (taken[d] == order[d].size()) continue;
      throw UsageError("mesh schedule: " + what(order[d][taken[d]]) +
                       " waits for ever, or is listed twice, in dimension " + std::to_string(d));
    }
  }
}

std::string MeshSchedule::to_json() const {
  ordered_json rows = ordered_json::array();
  for (const auto& of_dimension : order) {
    ordered_json row = ordered_json::array();
    for (const ChunkPhase& at : of_dimension) {
      row.push_back(ordered_json::array({at.chunk, at.phase}));
    }
    rows.push_back(std::move(row));
  }
  return ordered_json{
      {"format", kFormat}, {"kind", name(kind)}, {"routes", routes}, {"order", rows}}
      .dump();
}

MeshSchedule MeshSchedule::from_json(std::string_view json) {
  try {
    const ordered_json root = parse_json(json, "mesh schedule");
    if (root.at("format") != kFormat) throw UsageError("mesh schedule: unknown format");
    MeshSchedule out;
    out.kind = collective_from_name(root.at("kind").get<std::string>());
    for (const auto& row : array(root.at("routes"))) {
      Route& route = out.routes.emplace_back();
      for (const auto& d : array(row)) route.push_back(index(d));
    }
    for (const auto& row : array(root.at("order"))) {
      auto& of_dimension = out.order.emplace_back();
      for (const auto& at : array(row)) {
        if (array(at).size() != 2) throw UsageError("mesh schedule: " + at.dump() + " is no pair");
        of_dimension.push_back({0, index(at[0]), index(at[1])});
      }
    }
    return out;
  } catch (const ordered_json::exception& e) {
    throw UsageError(std::string("mesh schedule: malformed JSON: ") + e.what());
  } catch (const PlanError& e) {
    throw UsageError(std::string("mesh schedule: ") + e.what());
  }
}

}  // namespace usbyte
