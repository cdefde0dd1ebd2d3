// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/nccl/nccl.h"

namespace usbyte {

/// What `load_nccl` keeps: opens a copy anew on every call.
std::shared_ptr<NcclApi> open_nccl(const std::string& library,
                                   const std::vector<std::string>& candidates);

}  // namespace usbyte
