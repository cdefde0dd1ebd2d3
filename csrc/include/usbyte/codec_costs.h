#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "usbyte/network.h"

namespace usbyte {

/// What a codec costs one thread, or a device, for m bytes of float32 gradients: constant while they
/// are few, then by the byte, so max(alpha, beta m): an AlphaBeta whose whole startup overlaps.
struct CodecCost {
  AlphaBeta encode;  ///< making one message, feedback included
  AlphaBeta decode;  ///< adding what one message says to others
  /// Whether all messages of an op are coded at once, as by a kernel, and take as long as one of
  /// all their gradients; else they are coded one by one.
  bool at_once = false;

  /// What so many messages of one op take, each of so many bytes of gradients, s.
  double encode_s(int64_t messages, int64_t bytes) const { return of(encode, messages, bytes); }
  double decode_s(int64_t messages, int64_t bytes) const { return of(decode, messages, bytes); }
  bool operator==(const CodecCost&) const = default;

 private:
  double of(const AlphaBeta& cost, int64_t messages, int64_t bytes) const {
    if (messages == 0) return 0;
    return at_once ? cost.time_s(messages * bytes)
                   : static_cast<double>(messages) * cost.time_s(bytes);
  }
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
