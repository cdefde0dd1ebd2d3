#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "usbyte/network.h"

namespace usbyte {

/// What a codec costs one thread, for m bytes of float32 gradients: constant while they are few,
/// then by the byte, so max(alpha, beta m): an AlphaBeta whose whole startup overlaps.
struct CodecCost {
  AlphaBeta encode;  ///< making one message, feedback included
  AlphaBeta decode;  ///< adding what one message says to others; n messages take n times as long

  bool operator==(const CodecCost&) const = default;
};

/// The costs of codecs on one machine, by spec as in "topk:0.01".
struct CodecCosts {
  std::map<std::string, CodecCost, std::less<>> by_spec = {};

  /// Of a spec; "none" is free. Throws UsageError, with how to measure it, if it is not known.
  CodecCost of(std::string_view spec) const;

  std::string to_json() const;
  /// Throws UsageError on malformed JSON or numbers that are no costs.
  static CodecCosts from_json(std::string_view json);
  bool operator==(const CodecCosts&) const = default;
};

}  // namespace usbyte
