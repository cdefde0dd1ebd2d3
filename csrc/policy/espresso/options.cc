// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "usbyte/error.h"

namespace usbyte {
namespace {

// Tasks shorter by less than this are as long.
constexpr double kSame = 1e-9;

// So few are all tried, as what takes more of everything can still come at a better time.
constexpr size_t kFew = 16;

// Seconds on each resource and, first, those on the compute stream that backward has to wait for:
// decoding mostly comes when it has ended.
using Weight = std::array<double, kResources + 1>;

Weight weight_of(const TaskChain& chain) {
  Weight out{};
  const auto load = chain.load();
  std::copy(load.begin(), load.end(), out.begin() + 1);
  for (size_t i = 0; i < static_cast<size_t>(chain.count); ++i) {
    if (chain.resource[i] != static_cast<uint8_t>(Resource::compute)) break;
    out[0] += chain.seconds[i];
  }
  return out;
}

bool no_more_than(const Weight& a, const Weight& b) {
  for (size_t r = 0; r < a.size(); ++r) {
    if (a[r] > b[r] * (1 + kSame)) return false;
  }
  return true;
}

// Indices of the chains that no other takes as little of everything as, the fastest alone first.
std::vector<int> frontier(const std::vector<TaskChain>& chains,
                          const std::vector<int>& candidates) {
  std::vector<int> order = candidates;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return chains[static_cast<size_t>(a)].alone_s() < chains[static_cast<size_t>(b)].alone_s();
  });
  if (order.size() <= kFew) return order;
  std::vector<int> kept;
  std::vector<Weight> weights;
  for (int candidate : order) {
    const Weight weight = weight_of(chains[static_cast<size_t>(candidate)]);
    const bool worse = std::any_of(weights.begin(), weights.end(),
                                   [&](const auto& w) { return no_more_than(w, weight); });
    if (worse) continue;
    kept.push_back(candidate);
    weights.push_back(weight);
  }
  return kept;
}

bool on_one_processor(const Strategy& strategy, Processor processor) {
  return strategy == strategy.on(processor);
}

// The chains of one size, type and codec, where `twin_of` is by strategy.
Options options_of(const CompressionCluster& cluster, const CompressionJob::Tensor& tensor,
                   std::span<const Strategy> allowed, std::span<const int> twin_of,
                   Processor first) {
  const TaskChainBuilder maker(cluster, tensor);
  std::vector<TaskChain> every;
  std::vector<int> index_of(allowed.size(), -1), anything, single, uncompressed;
  for (size_t s = 0; s < allowed.size(); ++s) {
    const std::optional<TaskChain> chain = maker.make(allowed[s]);
    if (!chain) continue;
    const int index = static_cast<int>(every.size());
    index_of[s] = index;
    every.push_back(*chain);
    every.back().strategy = static_cast<int>(s);
    anything.push_back(index);
    if (on_one_processor(allowed[s], first)) single.push_back(index);
    if (!allowed[s].compresses()) uncompressed.push_back(index);
  }
  if (every.empty()) {
    throw UsageError("no strategy is allowed for codec '" + tensor.codec + "' and " +
                     std::string(name(tensor.dtype)));
  }
  if (single.empty()) single = anything;
  const std::vector<int>& starts = uncompressed.empty() ? single : uncompressed;
  Options out;
  std::map<int, int> place;  // in `out.all`
  const auto keep = [&](int index) {
    const auto [it, fresh] = place.try_emplace(index, static_cast<int>(out.all.size()));
    if (fresh) out.all.push_back(every[static_cast<size_t>(index)]);
    return it->second;
  };
  const std::vector<int> best = frontier(every, single);
  for (int index : best) out.on_one.push_back(keep(index));
  out.uncompressed = keep(frontier(every, starts).front());
  for (int index : frontier(every, anything)) keep(index);
  const size_t before = out.all.size();
  for (size_t i = 0; i < before; ++i) {
    const int twin = twin_of[static_cast<size_t>(out.all[i].strategy)];
    const int index = twin < 0 ? -1 : index_of[static_cast<size_t>(twin)];
    out.on_cpu.push_back(index < 0 ? -1 : keep(index));
  }
  out.on_cpu.resize(out.all.size(), -1);
  return out;
}

}  // namespace

StrategyTable::StrategyTable(const CompressionJob& job, const CompressionCluster& cluster,
                             std::span<const Strategy> allowed) {
  std::map<Strategy, int> index;
  for (size_t s = 0; s < allowed.size(); ++s) index.emplace(allowed[s], static_cast<int>(s));
  std::vector<int> twin_of(allowed.size(), -1);
  for (size_t s = 0; s < allowed.size(); ++s) {
    const Strategy twin = allowed[s].on(Processor::cpu);
    const auto it = index.find(twin);
    if (twin != allowed[s] && it != index.end()) twin_of[s] = it->second;
  }
  const Processor first = cluster.gpu ? Processor::gpu : Processor::cpu;
  for (const CompressionJob::Tensor& tensor : job.tensors) {
    const auto [it, fresh] = options_.try_emplace({tensor.numel, tensor.dtype, tensor.codec});
    if (fresh) it->second = options_of(cluster, tensor, allowed, twin_of, first);
    by_tensor_.push_back(&it->second);
  }
}

}  // namespace usbyte
