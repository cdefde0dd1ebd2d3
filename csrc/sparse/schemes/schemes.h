// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "usbyte/sparse.h"

namespace usbyte::sparse {

extern const SparseScheme kZen, kHierarchical, kAgSparse, kSparCml, kOmniReduce, kSparsePs,
    kDenseRing;

}  // namespace usbyte::sparse
