// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "random_plan.h"
#include "usbyte/profile.h"

namespace usbyte {

/// A job of a few small tensors of random sizes, whole seconds throughout.
inline Profile random_profile(std::mt19937& rng) {
  Profile p;
  p.tensors = random_tensors(rng);
  for (size_t i = 0; i < p.tensors.size(); ++i) {
    p.need_s.push_back(static_cast<double>(uniform(rng, 0, 20)));
    p.ready_s.push_back(static_cast<double>(uniform(rng, 0, 40)));
  }
  return p;
}

}  // namespace usbyte
