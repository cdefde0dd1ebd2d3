// SPDX-License-Identifier: Apache-2.0
#include "mesh_request.h"

#include <algorithm>
#include <utility>

namespace usbyte {
namespace {

/// One rank's part of each span among so many; none of those that are empty.
std::vector<BufferView> shards(const std::vector<BufferView>& spans, int64_t width, int part,
                               int parts) {
  std::vector<BufferView> out;
  for (const BufferView& span : spans) {
    const Block own = shard({0, span.count}, part, parts);
    if (own.numel() == 0) continue;
    out.push_back({static_cast<std::byte*>(span.data) + own.begin * width, own.numel()});
  }
  return out;
}

bool in_place(const Request& request) {
  if (request.kind != Collective::all_to_all) return request.send.empty();
  return std::ranges::equal(request.send, request.recv,
                            [](const BufferView& a, const BufferView& b) {
                              return a.data == b.data && a.count == b.count;
                            });
}

}  // namespace

std::string mesh_problem(const Request& request, const Topology& topology) {
  const std::string what = std::string(name(request.kind)) +
                           (request.schedule ? " with a schedule: " : " along a dimension: ");
  if (request.dimension >= topology.ndim()) {
    return what + "there is no dimension " + std::to_string(request.dimension);
  }
  if (request.schedule && request.dimension >= 0) return what + "it cannot have a dimension, too";
  if (!request.schedule && request.kind > Collective::all_gather &&
      request.kind != Collective::all_to_all) {
    return what + "only all_reduces, reduce_scatters, all_gathers and all_to_alls have one";
  }
  if (request.schedule && request.kind != Collective::all_reduce) {
    return what + "only all_reduces have one; launch it without";
  }
  if (request.schedule && request.schedule->kind != request.kind) {
    return what + "it is one of " + std::string(name(request.schedule->kind)) +
           "; make one for an all_reduce";
  }
  if (!in_place(request)) return what + "it is in place, and sends nothing else";
  if (request.kind == Collective::all_to_all) {
    const int ranks = topology.dimensions[static_cast<size_t>(request.dimension)].size;
    if (request.recv.size() != 1 || request.recv.front().count % ranks != 0) {
      return what + "it has one span, of as many elements for each of " + std::to_string(ranks) +
             " ranks";
    }
  }
  if (request.reduce != ReduceOp::sum) {
    return what + "it reduces sums only; launch others without";
  }
  if (request.scale != 1) return what + "axis groups do not scale; do so first";
  for (const BufferView& s : request.recv) {
    if (s.count < 0) return what + "the count " + std::to_string(s.count) + " is negative";
    if (s.count > 0 && !s.data) {
      return what + "a span of " + std::to_string(s.count) + " elements has no memory";
    }
  }
  return "";
}

MeshRequest::MeshRequest(const Request& request, Completion completion, const Topology& topology,
                         const std::vector<int>& coordinates)
    : done(std::move(completion)), request_(request) {
  if (!request.schedule) {
    std::vector<BufferView> spans = request.recv;
    std::erase_if(spans, [](const BufferView& span) { return span.count == 0; });
    spans_ = {{std::move(spans)}};
    left = topology.dimensions[static_cast<size_t>(request.dimension)].size > 1 ? 1 : 0;
    passed = {0};
    return;
  }
  const int64_t width = itemsize(request.dtype);
  const std::vector<Route>& routes = request.schedule->routes;
  for (size_t c = 0; c < routes.size(); ++c) {
    std::vector<BufferView> own =
        shards(request.recv, width, static_cast<int>(c), static_cast<int>(routes.size()));
    auto& walked = spans_.emplace_back();
    for (int d : routes[c]) {
      const auto at = static_cast<size_t>(d);
      walked.push_back(own);
      own = shards(own, width, coordinates[at], topology.dimensions[at].size);
    }
    left += 2 * std::ssize(routes[c]);
  }
  passed.resize(routes.size());
}

const std::vector<ChunkPhase>& MeshRequest::order(size_t dimension) const {
  static const std::vector<ChunkPhase> none, one = {{0, 0, 0}};
  if (request_.schedule) return request_.schedule->order[dimension];
  return left > 0 && static_cast<int>(dimension) == request_.dimension ? one : none;
}

Request MeshRequest::phase(int chunk, int phase) const {
  const auto& walked = spans_[static_cast<size_t>(chunk)];
  const int phases = static_cast<int>(2 * walked.size());
  Request out;
  if (!request_.schedule) {
    out.kind = request_.kind;
    out.dtype = request_.dtype;
    out.recv = walked.front();
    if (out.kind == Collective::all_to_all) out.send = out.recv;
    return out;
  }
  out.kind = phase < phases / 2 ? Collective::reduce_scatter : Collective::all_gather;
  out.dtype = request_.dtype;
  out.recv = walked[static_cast<size_t>(std::min(phase, phases - 1 - phase))];
  return out;
}

}  // namespace usbyte
