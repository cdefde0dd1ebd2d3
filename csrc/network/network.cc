// SPDX-License-Identifier: Apache-2.0
#include "usbyte/network.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "plan/json.h"
#include "simulator/mesh_simulator.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using nlohmann::ordered_json;

constexpr int kRounds = 4;                           // of alpha from beta and beta from alpha
constexpr int kOverlaps = 32;                        // values that are tried
constexpr double kAsGood = 1.25, kRounding = 0.002;  // of errors: more than that tells something
constexpr double kSmall = 0.1;  // of its time: what bytes may take of a small operation
constexpr double kOutlier = 2;  // times the median, or its part

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

// Of the values between half and twice the median: costs add up, so that the mean tells more.
double mean_without_outliers(const std::vector<double>& values) {
  const double middle = median(values);
  double sum = 0;
  int count = 0;
  for (double value : values) {
    if (value < middle / kOutlier || value > middle * kOutlier) continue;
    sum += value;
    ++count;
  }
  return count > 0 ? sum / count : middle;  // an even number of values may all be far away
}

ordered_json rows(const std::vector<AlphaBeta>& costs) {
  ordered_json out = ordered_json::array();
  for (const AlphaBeta& c : costs) {
    out.push_back({{"alpha_s", c.alpha_s},
                   {"beta_s_per_byte", c.beta_s_per_byte},
                   {"overlap_s", c.overlap_s}});
  }
  return out;
}

std::vector<AlphaBeta> costs(const ordered_json& rows) {
  std::vector<AlphaBeta> out;
  for (const auto& row : rows) {
    out.push_back({row.at("alpha_s").get<double>(), row.at("beta_s_per_byte").get<double>(),
                   row.value("overlap_s", 0.0)});
  }
  return out;
}

// What samples, and their medians by size, say if so much of the startup overlaps.
AlphaBeta with_overlap(std::span<const Sample> samples, const std::vector<Sample>& points,
                       double part) {
  const Sample largest = points.back();
  const double s_per_byte = largest.seconds / static_cast<double>(largest.bytes);
  AlphaBeta cost{0, s_per_byte, 0};
  if (points.size() == 1) return cost;
  const auto transfer_s = [](const Sample& p, double beta) {
    return beta * static_cast<double>(p.bytes);
  };
  int64_t small_bytes = points.front().bytes;
  for (const Sample& p : points) {
    if (transfer_s(p, s_per_byte) <= kSmall * p.seconds) small_bytes = p.bytes;
  }
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> startups;
    for (const Sample& p : samples) {
      if (p.bytes > small_bytes) continue;
      const double bytes_s = transfer_s(p, cost.beta_s_per_byte);
      const bool hidden = part == 1 || part * p.seconds >= bytes_s;
      startups.push_back(hidden ? p.seconds : std::max(p.seconds - bytes_s, 0.0) / (1 - part));
    }
    cost.alpha_s = mean_without_outliers(startups);
    cost.overlap_s = part * cost.alpha_s;
    cost.beta_s_per_byte =
        std::max(largest.seconds - cost.latency_s(), 0.0) / static_cast<double>(largest.bytes);
  }
  return cost;
}

}  // namespace

void AlphaBeta::validate(const std::string& what) const {
  if (!(alpha_s >= 0 && beta_s_per_byte >= 0 && std::isfinite(alpha_s + beta_s_per_byte))) {
    throw UsageError(what + ": a cost is negative or not finite");
  }
  if (!(overlap_s >= 0 && overlap_s <= alpha_s)) {
    throw UsageError(what + ": the overlap is negative or longer than the startup");
  }
}

AlphaBeta NetworkModel::cost(Collective kind, int in_flight) const {
  if (concurrent > 0) in_flight = std::min(in_flight, concurrent);
  const bool whole = kind == Collective::all_reduce;
  const std::vector<AlphaBeta>& own =
      kind == Collective::reduce_scatter ? reduce_scatter : all_gather;
  const std::vector<AlphaBeta>& row = whole || own.empty() ? all_reduce : own;
  const AlphaBeta c = row[std::min(static_cast<size_t>(in_flight), row.size()) - 1];
  if (whole || !own.empty()) return c;
  return {c.alpha_s / 2, c.beta_s_per_byte / 2, c.overlap_s / 2};
}

double NetworkModel::least_beta() const {
  const size_t windows = std::max({all_reduce.size(), reduce_scatter.size(), all_gather.size()});
  const auto least = [&](Collective kind) {
    double beta = std::numeric_limits<double>::infinity();
    for (int k = 1; k <= static_cast<int>(windows); ++k) {
      beta = std::min(beta, cost(kind, k).beta_s_per_byte);
    }
    return beta;
  };
  const double flat = std::min(least(Collective::all_reduce),
                               least(Collective::reduce_scatter) + least(Collective::all_gather));
  return topology ? std::min(flat, ideal_s(*topology, Collective::all_reduce, 1)) : flat;
}

NetworkModel NetworkModel::ring(int ranks, double latency_s, double bytes_per_s, int concurrent) {
  const double steps = ranks - 1;
  const AlphaBeta half{steps * latency_s, steps / ranks / bytes_per_s};
  NetworkModel model{
      ranks, {{2 * half.alpha_s, 2 * half.beta_s_per_byte}}, {half}, {half}, concurrent};
  model.validate();
  return model;
}

NetworkModel NetworkModel::scaled(double alpha, double beta) const {
  NetworkModel model = *this;
  for (auto* row : {&model.all_reduce, &model.reduce_scatter, &model.all_gather}) {
    for (AlphaBeta& c : *row) {
      c = {c.alpha_s * alpha, c.beta_s_per_byte * beta, c.overlap_s * alpha};
    }
  }
  model.busy_alpha_s *= alpha;
  for (double* s :
       {&model.one_shot.latency_s, &model.one_shot.gap_s, &model.one_shot.busy_latency_s}) {
    *s *= alpha;
  }
  if (beta == 0) model.topology.reset();  // no speed says that bytes take no time
  for (int d = 0; model.topology && d < model.topology->ndim(); ++d) {
    Dimension& dimension = model.topology->dimensions[static_cast<size_t>(d)];
    dimension.latency_s *= alpha;
    dimension.bytes_per_s /= beta;
  }
  model.validate();
  return model;
}

void NetworkModel::validate() const {
  if (ranks < 1) throw UsageError("network: " + std::to_string(ranks) + " ranks");
  if (concurrent < 0) throw UsageError("network: concurrent is negative");
  if (!(busy_alpha_s >= 0 && std::isfinite(busy_alpha_s))) {
    throw UsageError("network: busy_alpha_s is negative or not finite");
  }
  if (!(pack_s_per_byte >= 0 && std::isfinite(pack_s_per_byte))) {
    throw UsageError("network: pack_s_per_byte is negative or not finite");
  }
  const double shot_s = one_shot.latency_s + one_shot.gap_s + one_shot.busy_latency_s;
  if (!(one_shot.most_bytes >= 0 && one_shot.latency_s >= 0 && one_shot.gap_s >= 0 &&
        one_shot.busy_latency_s >= 0 && std::isfinite(shot_s))) {
    throw UsageError("network: a number of one_shot is negative or not finite");
  }
  if (all_reduce.empty()) throw UsageError("network: no cost of all_reduce");
  for (const auto* row : {&all_reduce, &reduce_scatter, &all_gather}) {
    for (const AlphaBeta& c : *row) c.validate("network");
  }
  if (!topology) return;
  topology->validate();
  if (topology->ranks() != ranks) {
    throw UsageError("network: " + std::to_string(ranks) + " ranks, but a topology of " +
                     std::to_string(topology->ranks()));
  }
}

std::string NetworkModel::to_json() const {
  const ordered_json shot = {{"most_bytes", one_shot.most_bytes},
                             {"latency_s", one_shot.latency_s},
                             {"gap_s", one_shot.gap_s},
                             {"busy_latency_s", one_shot.busy_latency_s}};
  ordered_json out = {{"format", "usbyte-network-1"},
                      {"ranks", ranks},
                      {"all_reduce", rows(all_reduce)},
                      {"reduce_scatter", rows(reduce_scatter)},
                      {"all_gather", rows(all_gather)},
                      {"concurrent", concurrent},
                      {"busy_alpha_s", busy_alpha_s},
                      {"pack_s_per_byte", pack_s_per_byte},
                      {"one_shot", shot}};
  if (topology) out["topology"] = ordered_json::parse(topology->to_json());
  return out.dump();
}

NetworkModel NetworkModel::from_json(std::string_view json) {
  try {
    const Json root = parse_json(json, "network");
    if (root.at("format") != "usbyte-network-1") throw UsageError("network: unknown format");
    NetworkModel model{whole<int>(root, "ranks"),         costs(root.at("all_reduce")),
                       costs(root.at("reduce_scatter")),  costs(root.at("all_gather")),
                       whole<int>(root, "concurrent", 0), root.value("busy_alpha_s", 0.0),
                       root.value("pack_s_per_byte", 0.0)};
    if (root.contains("one_shot")) {
      const auto& shot = root.at("one_shot");
      model.one_shot = {whole<int64_t>(shot, "most_bytes"), shot.at("latency_s").get<double>(),
                        shot.at("gap_s").get<double>(), shot.at("busy_latency_s").get<double>()};
    }
    if (root.contains("topology")) {
      model.topology = Topology::from_json(root.at("topology").dump());
    }
    model.validate();
    return model;
  } catch (const ordered_json::exception& e) {
    throw UsageError(std::string("network: malformed JSON: ") + e.what());
  }
}

Fit fit_cost(std::span<const Sample> samples) {
  if (samples.empty()) throw UsageError("fit_cost: no samples");
  std::map<int64_t, std::vector<double>> by_size;
  for (const Sample& s : samples) {
    if (s.bytes < 0 || !(s.seconds >= 0 && std::isfinite(s.seconds))) {
      throw UsageError("fit_cost: a sample of " + std::to_string(s.bytes) + " bytes took " +
                       std::to_string(s.seconds) + " s; neither can be negative, or not finite");
    }
    by_size[s.bytes].push_back(s.seconds);
  }
  if (by_size.rbegin()->first == 0) throw UsageError("fit_cost: all samples are of 0 bytes");
  std::vector<Sample> points;
  for (const auto& [bytes, seconds] : by_size) points.push_back({bytes, median(seconds)});

  std::vector<std::pair<double, Fit>> tried;  // mean error first
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= kOverlaps; ++i) {
    const AlphaBeta cost = with_overlap(samples, points, static_cast<double>(i) / kOverlaps);
    std::vector<double> errors;
    for (const auto& [bytes, seconds] : points) {
      errors.push_back(std::abs(cost.time_s(bytes) - seconds) / std::max(seconds, 1e-12));
    }
    const double mean =
        std::accumulate(errors.begin(), errors.end(), 0.0) / static_cast<double>(errors.size());
    tried.push_back({mean, {cost, median(std::move(errors))}});
    least = std::min(least, mean);
  }
  while (tried.back().first > kAsGood * least + kRounding) tried.pop_back();
  return tried.back().second;
}

}  // namespace usbyte
