// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "usbyte/codec_costs.h"
#include "usbyte/error.h"
#include "usbyte/network.h"
#include "usbyte/plan.h"
#include "usbyte/profile.h"
#include "usbyte/topology.h"

namespace usbyte::test {

template <typename T>
T reread(std::string_view text) {
  const T value = T::from_json(text);
  const std::string written = value.to_json();
  if (T::from_json(written).to_json() != written) {
    throw std::logic_error("what was written reads as something else: " + written);
  }
  return value;
}

/// Reads the input behind its first character, which says as what. Either that is an error of ours,
/// or the value can be written and read again, and used; anything else is thrown.
inline void check_parser(std::string_view input) {
  if (input.empty()) return;
  const std::string_view text = input.substr(1);
  try {
    switch (input[0]) {
      case 'P': {
        const Plan plan = reread<Plan>(text);
        if (plan.hash() != Plan::from_json(plan.to_json()).hash()) {
          throw std::logic_error("a plan that was read again has another hash");
        }
        (void)plan.flat_buffer_bytes();
        for (size_t i = 0; i < std::min<size_t>(plan.ops().size(), 8); ++i) {
          (void)plan.describe(static_cast<int>(i));
        }
        return;
      }
      case 'F': {
        const Profile profile = reread<Profile>(text);
        (void)profile.bytes();
        if (profile.tensors.size() < 1000) (void)due_times(profile, Overlap::forward);
        return;
      }
      case 'N':
        return void(reread<NetworkModel>(text));
      case 'T':
        return void(reread<Topology>(text));
      case 'M':
        return void(reread<MeshSchedule>(text));
      case 'C':
        return void(reread<CodecCosts>(text));
      default:
        return;
    }
  } catch (const UsageError&) {
  } catch (const PlanError&) {
  }
}

}  // namespace usbyte::test
