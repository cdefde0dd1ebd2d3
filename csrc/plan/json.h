// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "usbyte/error.h"
#include "usbyte/tensor.h"

/// How plans, profiles, networks and the like are read: they come from files and from other ranks,
/// so that whatever is in them ends quickly in a value or in an error.
namespace usbyte {

using Json = nlohmann::ordered_json;

/// Room for plans of several hundred thousand tensors and ops; parsed, a text takes ten times that.
inline constexpr size_t kMostJsonBytes = size_t{64} << 20;
/// Four times what the deepest format has. Some of nlohmann's functions recurse.
inline constexpr int kMostJsonDepth = 32;
/// Of a flat buffer, or of a sparse gradient: a hundred times the largest model there is, and small
/// enough that its bytes and sums of costs fit an int64.
inline constexpr int64_t kMostElements = int64_t{1} << 48;

/// Throws UsageError for a text that is too large or too deep, Json::exception for one that is no
/// JSON or has numbers that no double holds. `what` begins the message.
Json parse_json(std::string_view text, const std::string& what = "");

/// The value for a message, cut off.
std::string shown(const Json& value);

/// The number, if it is whole and fits; Json's own conversions cut numbers off, or are undefined.
template <typename Int>
Int whole(const Json& value) {
  if (value.is_number_integer()) {
    const bool large = value.is_number_unsigned() &&
                       value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
    const int64_t number = large ? 0 : value.get<int64_t>();
    if (!large && number >= std::numeric_limits<Int>::min() &&
        number <= std::numeric_limits<Int>::max()) {
      return static_cast<Int>(number);
    }
  }
  throw UsageError(shown(value) + " is no whole number, or too large");
}

/// The same of a field.
template <typename Int>
Int whole(const Json& row, const char* field) {
  try {
    return whole<Int>(row.at(field));
  } catch (const UsageError& e) {
    throw UsageError(std::string(field) + ": " + e.what());
  }
}

/// The same of one that need not be there.
template <typename Int>
Int whole(const Json& row, const char* field, Int fallback) {
  return row.contains(field) ? whole<Int>(row, field) : fallback;
}

/// A tensor's name, numel, dtype, rows and width, at an offset that is in bounds.
TensorSpec tensor_of(const Json& row, int64_t offset);

}  // namespace usbyte
