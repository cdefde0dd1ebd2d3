// SPDX-License-Identifier: Apache-2.0
#include "merge_adjacent.h"

#include <algorithm>

namespace usbyte {

std::vector<Block> merge_adjacent(std::vector<Block> blocks) {
  std::sort(blocks.begin(), blocks.end());
  std::vector<Block> out;
  for (Block b : blocks) {
    if (!out.empty() && out.back().end == b.begin) {
      out.back().end = b.end;
    } else {
      out.push_back(b);
    }
  }
  return out;
}

}  // namespace usbyte
