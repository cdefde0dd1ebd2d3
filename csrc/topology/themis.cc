// SPDX-License-Identifier: Apache-2.0
#include "themis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr std::array<std::string_view, 3> kLatencies = {"each_phase", "once", "original"};

void check(Collective kind, double bytes, int chunks, const ThemisOptions& options) {
  if (kind != Collective::all_reduce && kind != Collective::reduce_scatter &&
      kind != Collective::all_gather && kind != Collective::all_to_all) {
    throw UsageError("themis: no routes for a " + std::string(name(kind)));
  }
  if (!(bytes >= 0 && std::isfinite(bytes))) {
    throw UsageError("themis: bytes are negative or not finite");
  }
  if (chunks < 1) throw UsageError("themis: " + std::to_string(chunks) + " chunks");
  if (!(options.threshold_divisor > 0)) {
    throw UsageError("themis: threshold_divisor is not positive");
  }
}

Route innermost_first(const Topology& topology) {
  Route out;
  for (int d = 0; d < topology.ndim(); ++d) {
    if (topology.dimensions[static_cast<size_t>(d)].size > 1) out.push_back(d);
  }
  return out;
}

// Loads of dimensions, in seconds of their reduce_scatter phases.
class LoadTracker {
 public:
  LoadTracker(const Topology& topology, Collective kind, const ThemisOptions& options)
      : topology_(topology),
        options_(options),
        of_all_reduce_(kind == Collective::all_reduce),
        fixed_(innermost_first(topology)),
        loads_s_(topology.dimensions.size()) {
    if (options.latency != ThemisLatency::once) return;
    for (int d : fixed_) load_s(d) = dimension(d).startup_s();
  }

  Route route(double chunk_bytes) const {
    if (fixed_.empty()) return fixed_;
    const auto load = [this](int d) { return loads_s_[static_cast<size_t>(d)]; };
    Route by_load = fixed_;
    std::ranges::stable_sort(by_load, {}, load);
    const double difference_s = load(by_load.back()) - load(by_load.front());
    const double worth_s = phase_s(by_load.front(), chunk_bytes / options_.threshold_divisor);
    return difference_s < worth_s ? fixed_ : by_load;
  }

  void add(const Route& route, double bytes) {
    for (int d : route) {
      load_s(d) += phase_s(d, bytes);
      bytes /= dimension(d).size;
    }
  }

  const std::vector<double>& loads_s() const { return loads_s_; }

 private:
  const Dimension& dimension(int d) const { return topology_.dimensions[static_cast<size_t>(d)]; }
  double& load_s(int d) { return loads_s_[static_cast<size_t>(d)]; }
  double phase_s(int d, double bytes) const {
    const Dimension& at = dimension(d);
    const double transfer_s = at.moved_bytes(bytes, of_all_reduce_) / at.bytes_per_s;
    return transfer_s + (options_.latency == ThemisLatency::each_phase ? at.startup_s() : 0);
  }

  const Topology& topology_;
  const ThemisOptions& options_;
  const bool of_all_reduce_;
  const Route fixed_;
  std::vector<double> loads_s_;
};

}  // namespace

std::string_view name(ThemisLatency latency) { return kLatencies.at(static_cast<size_t>(latency)); }

ThemisLatency themis_latency_from_name(std::string_view text) {
  const auto found = std::ranges::find(kLatencies, text);
  if (found == kLatencies.end()) {
    throw UsageError("themis: unknown way to count latency '" + std::string(text) +
                     "'; known are each_phase, once, original");
  }
  return static_cast<ThemisLatency>(found - kLatencies.begin());
}

std::vector<Route> fixed_routes(const Topology& topology, int chunks) {
  topology.validate();
  check(Collective::all_reduce, 0, chunks, {});
  return std::vector<Route>(static_cast<size_t>(chunks), innermost_first(topology));
}

std::vector<Route> themis_routes(const Topology& topology, Collective kind, double bytes,
                                 int chunks, const ThemisOptions& options) {
  topology.validate();
  check(kind, bytes, chunks, options);
  if (kind == Collective::all_to_all) return fixed_routes(topology, chunks);
  LoadTracker tracker(topology, kind, options);
  std::vector<Route> out;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    out.push_back(tracker.route(bytes / chunks));
    tracker.add(out.back(), bytes / chunks);
  }
  return out;
}

std::vector<double> route_loads_s(const Topology& topology, Collective kind, double bytes,
                                  const std::vector<Route>& routes, const ThemisOptions& options) {
  topology.validate();
  check(kind, bytes, static_cast<int>(routes.size()), options);
  if (kind == Collective::all_to_all) {
    throw UsageError("themis: loads of an all_to_all do not depend on its routes");
  }
  LoadTracker tracker(topology, kind, options);
  for (const Route& route : routes) {
    mesh_phases(topology, kind, route, 0);  // throws unless it is one
    tracker.add(route, bytes / static_cast<double>(routes.size()));
  }
  return tracker.loads_s();
}

TwoDimensionShare two_dimension_share(const Topology& topology) {
  topology.validate();
  const Route both = innermost_first(topology);
  if (both.size() != 2) {
    throw UsageError("two_dimension_share: " + std::to_string(both.size()) +
                     " dimensions with more than one rank");
  }
  const Dimension& inner = topology.dimensions[static_cast<size_t>(both[0])];
  const Dimension& outer = topology.dimensions[static_cast<size_t>(both[1])];
  const double first_inner = inner.moved_bytes(1, true) / inner.bytes_per_s;  // a1 / B1
  const double first_outer = outer.moved_bytes(1, true) / outer.bytes_per_s;  // a2 / B2
  const double later_inner = first_inner / outer.size, later_outer = first_outer / inner.size;
  const auto busiest = [&](double x) {
    return std::max(x * first_inner + (1 - x) * later_inner,
                    x * later_outer + (1 - x) * first_outer);
  };
  TwoDimensionShare out;
  out.gains = first_inner > later_outer;
  out.inner_first = std::clamp(
      (first_outer - later_inner) / (first_inner - later_inner + first_outer - later_outer), 0.0,
      1.0);
  out.gain = busiest(1) / busiest(out.inner_first);
  return out;
}

std::vector<MeshChoice> route_choices(const Topology& topology, Collective kind, double bytes,
                                      int chunks, const ThemisOptions& options,
                                      const MeshOptions& mesh) {
  std::vector<MeshChoice> out;
  const double ideal = usbyte::ideal_s(topology, kind, bytes);
  const auto add = [&](const char* name, std::vector<Route> routes, MeshQueue queue) {
    MeshOptions rules = mesh;
    rules.queue = queue;
    const MeshCollective collective{kind, bytes, std::move(routes), {}, 0, {}};
    const MeshRun run = simulate_mesh(topology, {collective}, rules);
    const double fixed_s = out.empty() ? run.finish_s : out.front().seconds;
    out.push_back({name, run.schedule(collective), run.finish_s, fixed_s, ideal});
  };
  add("fixed", fixed_routes(topology, chunks), MeshQueue::fifo);
  const std::vector<Route> routes = themis_routes(topology, kind, bytes, chunks, options);
  add("themis+fifo", routes, MeshQueue::fifo);
  add("themis+scf", routes, MeshQueue::smallest_chunk_first);
  return out;
}

MeshChoice chosen_routes(const Topology& topology, Collective kind, double bytes, int chunks,
                         const ThemisOptions& options, const MeshOptions& mesh) {
  std::vector<MeshChoice> all = route_choices(topology, kind, bytes, chunks, options, mesh);
  return std::move(*std::ranges::min_element(all, {}, &MeshChoice::seconds));
}

}  // namespace usbyte
