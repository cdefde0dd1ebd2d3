// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "usbyte/plan.h"

namespace usbyte {

/// The same elements with neighbours in the flat buffer as one block, in the order of the flat
/// buffer.
std::vector<Block> merge_adjacent(std::vector<Block> blocks);

}  // namespace usbyte
