// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/dimension_path.h"
#include "random_plan.h"
#include "ranks.h"
#include "usbyte/codec.h"
#include "usbyte/plan.h"

// Plans whose ops go along dimensions of a mesh.
namespace usbyte::test {

/// Meshes of two dimensions of more than one rank.
inline const std::vector<std::vector<int>> kLineMeshes = {{2, 2}, {3, 2}, {2, 3}, {2, 1, 2}};

/// All_reduces that tile up to five tensors, each with a codec, along dimensions, by that codec in
/// one dimension or both; some without.
inline Plan random_lines(Random& random, const Topology& topology,
                         const std::vector<std::string>& codecs,
                         const std::vector<std::string>& gathers, DType dtype = DType::float32) {
  std::vector<TensorSpec> tensors;
  int64_t end = 0;
  for (int64_t t = random(1, 5); t > 0; --t) {
    tensors.push_back({"t" + std::to_string(t), random(1, 40), dtype, end, 1, 0});
    end = tensors.back().end();
  }
  std::vector<Op> ops;
  for (int64_t begin = 0; begin < end;) {
    const int64_t next = std::min(begin + random(1, 30), end);
    ops.push_back({Collective::all_reduce, {{begin, next}}, std::numeric_limits<int64_t>::max()});
    ops.back().codec = codecs[static_cast<size_t>(random(0, std::ssize(codecs) - 1))];
    begin = next;
  }
  std::shuffle(ops.begin(), ops.end(), random.engine());
  // Some of several blocks.
  std::vector<Op> joined;
  for (Op& op : ops) {
    op.window_bytes = random(1, 200);
    op.fence = random.one_in(4);
    if (!joined.empty() && joined.back().codec == op.codec && random.one_in(2)) {
      joined.back().blocks.push_back(op.blocks.front());
    } else {
      joined.push_back(op);
    }
  }
  std::vector<int> dimensions;
  for (int d = 0; d < topology.ndim(); ++d) {
    if (topology.dimensions[static_cast<size_t>(d)].size > 1) dimensions.push_back(d);
  }
  std::vector<std::optional<DimensionPath>> paths(joined.size());
  for (size_t i = 0; i < joined.size(); ++i) {
    if (!has_dimension_paths(joined[i])) continue;
    DimensionPath path{dimensions[static_cast<size_t>(random(0, 1))], "none", joined[i].codec,
                       "none"};
    const auto codec = make_codec(joined[i].codec);
    const bool unsent = codec->remembers().empty() || codec->remembers() == "unsent";
    if (codec->relays() && unsent && random.one_in(2)) path.scatter = joined[i].codec;
    if (path.scatter != "none" && random.one_in(3)) path.sum = "none";
    const auto last = static_cast<size_t>(random(0, std::ssize(gathers)));
    if (last > 0) path.gather = gathers[last - 1];
    paths[i] = path;
  }
  return along_dimensions(Plan("test", tensors, joined), topology, paths);
}

}  // namespace usbyte::test
