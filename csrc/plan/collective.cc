#include "usbyte/collective.h"

#include <algorithm>
#include <array>
#include <string>

#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr std::array<std::string_view, 7> kCollectives = {
    "all_reduce", "reduce_scatter", "all_gather",       "broadcast",
    "all_to_all", "barrier",        "sparse_all_reduce"};

}  // namespace

std::string_view name(Collective kind) { return kCollectives.at(static_cast<size_t>(kind)); }

bool reduces(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce_scatter;
}

Collective collective_from_name(std::string_view text) {
  auto it = std::find(kCollectives.begin(), kCollectives.end(), text);
  if (it == kCollectives.end()) {
    throw PlanError("unknown collective '" + std::string(text) + "'");
  }
  return static_cast<Collective>(it - kCollectives.begin());
}

}  // namespace usbyte
