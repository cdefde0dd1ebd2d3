#pragma once

#include <cstdint>
#include <string_view>

namespace usbyte {

/// Collective operations. A plan uses the first three, which have blocks, and sparse_all_reduce,
/// which no communicator knows; the others serve communicators and eager calls.
enum class Collective : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  barrier,
  sparse_all_reduce
};

std::string_view name(Collective kind);
/// Inverse of `name`; throws PlanError on an unknown spelling.
Collective collective_from_name(std::string_view name);

/// all_reduce and reduce_scatter.
bool reduces(Collective kind);

}  // namespace usbyte
