// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "random_plan.h"
#include "usbyte/network.h"
#include "usbyte/profile.h"

namespace usbyte {

inline double uniform_real(std::mt19937& rng, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(rng);
}

/// One dtype and, as in a chain of layers, backward in the reverse order of forward. Sizes are
/// log-uniform up to `max_numel` elements, times of the order of a second.
inline Profile random_chain(std::mt19937& rng, int64_t count, double max_numel) {
  Profile p;
  int64_t offset = 0;
  double now = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto numel =
        static_cast<int64_t>(std::exp(uniform_real(rng, 0, std::log(max_numel))) + 0.5);
    p.tensors.push_back({"t" + std::to_string(i), numel, DType::float32, offset});
    offset += numel;
    p.need_s.push_back(now);
    now += uniform_real(rng, 0, 1.0 / static_cast<double>(count));
  }
  p.ready_s.resize(p.need_s.size());
  for (size_t i = p.ready_s.size(); i-- > 0;) {
    now += uniform_real(rng, 0, 2.0 / static_cast<double>(count));
    p.ready_s[i] = now;
  }
  p.step_s = now;
  return p;
}

/// Also several dtypes, orders that are not each other's reverse, equal and missing times.
inline Profile random_job(std::mt19937& rng, int64_t count, double max_numel) {
  constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::float64, DType::int8};
  Profile p = random_chain(rng, count, max_numel);
  if (uniform(rng, 0, 1)) {
    DType dtype = DType::float32;
    for (TensorSpec& t : p.tensors) {
      if (uniform(rng, 0, 4) == 0) dtype = kTypes[uniform(rng, 0, 3)];
      t.dtype = dtype;
    }
  }
  for (std::vector<double>* times : {&p.need_s, &p.ready_s}) {
    const double one = times->front();
    switch (uniform(rng, 0, 5)) {
      case 0:
        std::fill(times->begin(), times->end(), uniform(rng, 0, 1) ? one : 0);
        break;
      case 1:
        std::shuffle(times->begin(), times->end(), rng);
        break;
      case 2:
        for (double& t : *times) t = std::floor(t * 4) / 4;
        break;
      default:
        break;
    }
  }
  if (uniform(rng, 0, 1)) p.update_s = uniform_real(rng, 0, 0.1);
  p.step_s = uniform(rng, 0, 1) ? 0 : p.backward_end_s() + p.update_s + 1;
  return p;
}

/// From nothing to milliseconds and tens of nanoseconds a byte; at times with own costs of halves
/// and of ops in flight.
inline NetworkModel random_network(std::mt19937& rng) {
  const auto cost = [&] {
    AlphaBeta c;
    if (uniform(rng, 0, 4)) c.alpha_s = std::exp(uniform_real(rng, std::log(1e-6), std::log(1e-1)));
    if (uniform(rng, 0, 4)) {
      c.beta_s_per_byte = std::exp(uniform_real(rng, std::log(1e-11), std::log(1e-7)));
    }
    if (uniform(rng, 0, 1)) c.overlap_s = c.alpha_s * uniform_real(rng, 0, 1);
    return c;
  };
  NetworkModel network{4, {cost()}};
  if (uniform(rng, 0, 2) == 0) network.all_reduce.push_back(cost());
  if (uniform(rng, 0, 2) == 0) {
    network.reduce_scatter = {cost()};
    network.all_gather = {cost(), cost()};
  }
  return network;
}

}  // namespace usbyte
