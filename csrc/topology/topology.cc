// SPDX-License-Identifier: Apache-2.0
#include "usbyte/topology.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "plan/json.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kFormat = "usbyte-topology-1";
constexpr std::array<std::string_view, 3> kKinds = {"ring", "fully_connected", "switched"};
constexpr std::array<std::string_view, 6> kFields = {"name",      "size", "bytes_per_s",
                                                     "latency_s", "kind", "in_network_reduction"};
constexpr size_t kMostDimensions = 64;

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string which(const Dimension& dimension, size_t index) {
  return "topology: dimension " + std::to_string(index) + " " + in_quotes(dimension.name);
}

int size_of(const ordered_json& value, const std::string& culprit) {
  if (!value.is_number_integer()) throw UsageError(culprit + ": size is no integer");
  // Larger numbers than int64 are unsigned here, and would wrap around to some that fit.
  const int64_t size =
      value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int>::max()
          ? std::numeric_limits<int64_t>::max()
          : value.get<int64_t>();
  if (size < 1 || size > std::numeric_limits<int>::max()) {
    throw UsageError(culprit + ": size is " + value.dump() + ", and must be 1 or more and an int");
  }
  return static_cast<int>(size);
}

Dimension dimension_of(const ordered_json& row, size_t index) {
  std::string culprit = "topology: dimension " + std::to_string(index);
  if (!row.is_object()) throw UsageError(culprit + " is no object");
  for (const auto& [field, value] : row.items()) {
    if (std::ranges::find(kFields, field) == kFields.end()) {
      throw UsageError(culprit + ": unknown field " + in_quotes(field));
    }
  }
  for (const char* field : {"name", "size", "bytes_per_s", "kind"}) {
    if (!row.contains(field)) throw UsageError(culprit + ": no " + field);
  }
  Dimension out;
  out.name = row.at("name").get<std::string>();
  culprit += " " + in_quotes(out.name);
  out.size = size_of(row.at("size"), culprit);
  for (const char* field : {"bytes_per_s", "latency_s"}) {
    if (row.contains(field) && !row.at(field).is_number()) {
      throw UsageError(culprit + ": " + field + " is no number");
    }
  }
  out.bytes_per_s = row.at("bytes_per_s").get<double>();
  out.latency_s = row.value("latency_s", 0.0);
  out.kind = dimension_kind_from_name(row.at("kind").get<std::string>());
  out.in_network_reduction = row.value("in_network_reduction", false);
  return out;
}

}  // namespace

std::string_view name(DimensionKind kind) { return kKinds.at(static_cast<size_t>(kind)); }

DimensionKind dimension_kind_from_name(std::string_view text) {
  const auto found = std::ranges::find(kKinds, text);
  if (found == kKinds.end()) {
    throw UsageError("topology: unknown kind of dimension " + in_quotes(text) +
                     "; known are ring, fully_connected, switched");
  }
  return static_cast<DimensionKind>(found - kKinds.begin());
}

int Dimension::steps() const {
  if (size <= 1) return 0;
  switch (kind) {
    case DimensionKind::ring:
      return size - 1;
    case DimensionKind::fully_connected:
      return 1;
    case DimensionKind::switched:
      break;
  }
  return in_network_reduction ? 1 : std::bit_width(static_cast<unsigned>(size - 1));
}

double Dimension::moved_bytes(double bytes, bool of_all_reduce) const {
  if (of_all_reduce && in_network_reduction && size > 1) return bytes / 2;
  return bytes * (size - 1) / size;
}

double Dimension::exchanged_bytes(double bytes) const {
  return kind == DimensionKind::ring ? bytes * (size - 1) / 2 : moved_bytes(bytes, false);
}

int Topology::ranks() const {
  int product = 1;
  for (const Dimension& d : dimensions) product *= d.size;
  return product;
}

double Topology::bytes_per_s() const {
  double sum = 0;
  for (const Dimension& d : dimensions) {
    if (d.size > 1) sum += d.bytes_per_s;
  }
  return sum;
}

std::vector<int> Topology::coordinates(int rank) const {
  if (rank < 0 || rank >= ranks()) {
    throw UsageError("topology: rank " + std::to_string(rank) + " of " + std::to_string(ranks()));
  }
  std::vector<int> out;
  for (const Dimension& d : dimensions) {
    out.push_back(rank % d.size);
    rank /= d.size;
  }
  return out;
}

int Topology::rank(const std::vector<int>& coordinates) const {
  if (coordinates.size() != dimensions.size()) {
    throw UsageError("topology: " + std::to_string(coordinates.size()) + " coordinates for " +
                     std::to_string(dimensions.size()) + " dimensions");
  }
  int out = 0, stride = 1;
  for (size_t d = 0; d < dimensions.size(); ++d) {
    if (coordinates[d] < 0 || coordinates[d] >= dimensions[d].size) {
      throw UsageError(which(dimensions[d], d) + " has no coordinate " +
                       std::to_string(coordinates[d]));
    }
    out += coordinates[d] * stride;
    stride *= dimensions[d].size;
  }
  return out;
}

std::vector<int> Topology::axis_group(int rank, int dimension) const {
  std::vector<int> at = coordinates(rank);
  if (dimension < 0 || dimension >= ndim()) {
    throw UsageError("topology: no dimension " + std::to_string(dimension));
  }
  std::vector<int> out;
  int& coordinate = at[static_cast<size_t>(dimension)];
  for (coordinate = 0; coordinate < dimensions[static_cast<size_t>(dimension)].size; ++coordinate) {
    out.push_back(this->rank(at));
  }
  return out;
}

Topology Topology::among(const std::vector<int>& sizes) const {
  Topology out = *this;
  if (sizes.empty()) return out;
  if (sizes.size() != dimensions.size()) {
    throw UsageError("topology: " + std::to_string(sizes.size()) + " sizes for " +
                     std::to_string(dimensions.size()) + " dimensions");
  }
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 1 || dimensions[d].size % sizes[d] != 0) {
      throw UsageError(which(dimensions[d], d) + ": " + std::to_string(sizes[d]) +
                       " ranks do not divide its " + std::to_string(dimensions[d].size));
    }
    out.dimensions[d].size = sizes[d];
  }
  return out;
}

void Topology::validate() const {
  if (dimensions.empty()) throw UsageError("topology: no dimensions");
  if (dimensions.size() > kMostDimensions) {
    throw UsageError("topology: " + std::to_string(dimensions.size()) + " dimensions, at most " +
                     std::to_string(kMostDimensions));
  }
  std::set<std::string_view> names;
  int64_t product = 1;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    const Dimension& d = dimensions[i];
    if (d.name.empty() || !names.insert(d.name).second) {
      throw UsageError(which(d, i) + ": the name is empty or taken");
    }
    if (d.size < 1) throw UsageError(which(d, i) + ": size is " + std::to_string(d.size));
    product *= d.size;
    if (product > std::numeric_limits<int>::max()) {
      throw UsageError(which(d, i) + ": there are more ranks than fit an int");
    }
    if (!(d.bytes_per_s > 0 && std::isfinite(d.bytes_per_s))) {
      throw UsageError(which(d, i) + ": bytes_per_s is not positive and finite");
    }
    if (!(d.latency_s >= 0 && std::isfinite(d.latency_s))) {
      throw UsageError(which(d, i) + ": latency_s is negative or not finite");
    }
    name(d.kind);
    if (d.in_network_reduction && d.kind != DimensionKind::switched) {
      throw UsageError(which(d, i) + ": only a switch adds up; its kind is " +
                       std::string(usbyte::name(d.kind)));
    }
  }
}

std::string Topology::to_json() const {
  ordered_json rows = ordered_json::array();
  for (const Dimension& d : dimensions) {
    rows.push_back({{"name", d.name},
                    {"size", d.size},
                    {"bytes_per_s", d.bytes_per_s},
                    {"latency_s", d.latency_s},
                    {"kind", name(d.kind)},
                    {"in_network_reduction", d.in_network_reduction}});
  }
  return ordered_json{{"format", kFormat}, {"dimensions", rows}}.dump();
}

Topology Topology::from_json(std::string_view json) {
  try {
    const ordered_json root = parse_json(json, "topology");
    if (!root.is_object() || root.value("format", "") != kFormat) {
      throw UsageError("topology: unknown format, not " + std::string(kFormat));
    }
    for (const auto& [field, value] : root.items()) {
      if (field != "format" && field != "dimensions") {
        throw UsageError("topology: unknown field " + in_quotes(field));
      }
    }
    const ordered_json& rows = root.at("dimensions");
    if (!rows.is_array()) throw UsageError("topology: dimensions are no list");
    if (rows.size() > kMostDimensions) {
      throw UsageError("topology: " + std::to_string(rows.size()) + " dimensions, at most " +
                       std::to_string(kMostDimensions));
    }
    Topology out;
    for (size_t i = 0; i < rows.size(); ++i) out.dimensions.push_back(dimension_of(rows[i], i));
    out.validate();
    return out;
  } catch (const ordered_json::exception& e) {
    throw UsageError(std::string("topology: malformed JSON: ") + e.what());
  }
}

std::vector<MeshPhase> mesh_phases(const Topology& topology, Collective kind, const Route& route,
                                   double bytes) {
  if (kind != Collective::all_reduce && kind != Collective::reduce_scatter &&
      kind != Collective::all_gather && kind != Collective::all_to_all) {
    throw UsageError("mesh: no way to walk the phases of a " + std::string(name(kind)));
  }
  Route walked = route, all = {};
  std::ranges::sort(walked);
  for (int d = 0; d < topology.ndim(); ++d) {
    if (topology.dimensions[static_cast<size_t>(d)].size > 1) all.push_back(d);
  }
  if (walked != all) {
    std::string text;
    for (int d : route) text += (text.empty() ? "" : ", ") + std::to_string(d);
    throw UsageError("mesh: route [" + text + "] is no order of the " + std::to_string(all.size()) +
                     " dimensions with more than one rank");
  }
  std::vector<MeshPhase> down, up;  // to parts of the vector, and back to all of it
  for (int d : route) {
    const Dimension& dimension = topology.dimensions[static_cast<size_t>(d)];
    const bool exchange = kind == Collective::all_to_all;
    const double moved = exchange ? dimension.exchanged_bytes(bytes)
                                  : dimension.moved_bytes(bytes, kind == Collective::all_reduce);
    const MeshPhase phase{d,
                          exchange ? kind : Collective::reduce_scatter,
                          bytes,
                          moved,
                          dimension.startup_s(),
                          moved / dimension.bytes_per_s};
    down.push_back(phase);
    up.push_back(phase);
    up.back().kind = Collective::all_gather;
    if (!exchange) bytes /= dimension.size;
  }
  if (kind == Collective::reduce_scatter || kind == Collective::all_to_all) return down;
  std::ranges::reverse(up);
  if (kind == Collective::all_gather) return up;
  down.insert(down.end(), up.begin(), up.end());
  return down;
}

}  // namespace usbyte
