#pragma once

#include "usbyte/sparse.h"

namespace usbyte::sparse {

extern const SparseScheme kZen;

}  // namespace usbyte::sparse
