// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "usbyte/network.h"

namespace usbyte {

/// What a codec costs one thread, or a device, for m bytes of float32 gradients: constant while
/// they are few, then by the byte, so max(alpha, beta m): an AlphaBeta all of whose startup
/// overlaps.
struct CodecCost {
  AlphaBeta encode;  ///< making one message, feedback included
  AlphaBeta decode;  ///< adding what one message says to others
  /// Whether all messages of an op are coded at once, as a device does: then the least time is that
  /// of them all, and of several messages of the same gradients, which are written once, each but
  /// the first takes `further_s_per_byte`. Else they are coded one by one.
  bool at_once = false;
  double further_s_per_byte = 0;

  /// Encoding so many messages of one op, each of so many bytes of gradients, s.
  double encode_s(int64_t messages, int64_t bytes) const {
    if (messages == 0) return 0;
    return at_once ? encode.time_s(messages * bytes)
                   : static_cast<double>(messages) * encode.time_s(bytes);
  }
  /// Decoding so many messages of each of so many blocks of an op, s; `bytes` is a block's.
  double decode_s(int64_t blocks, int64_t messages, int64_t bytes) const {
    if (blocks * messages == 0) return 0;
    if (!at_once) return static_cast<double>(blocks * messages) * decode.time_s(bytes);
    const double s_per_byte =
        decode.beta_s_per_byte + static_cast<double>(messages - 1) * further_s_per_byte;
    return AlphaBeta{decode.alpha_s, s_per_byte, decode.overlap_s}.time_s(blocks * bytes);
  }
  bool operator==(const CodecCost&) const = default;
};

/// The costs of codecs on one machine, by spec as in "topk:0.01".
struct CodecCosts {
  std::map<std::string, CodecCost, std::less<>> by_spec = {};
  /// Adding up what was picked by a scheme of sparse.h, for each of `rows_handled`, s.
  double row_s = 0;

  /// Of a spec; "none" is free. Throws UsageError, with how to measure it, if it is not known.
  CodecCost of(std::string_view spec) const;

  std::string to_json() const;
  /// Throws UsageError on malformed JSON or numbers that are no costs.
  static CodecCosts from_json(std::string_view json);
  bool operator==(const CodecCosts&) const = default;
};

}  // namespace usbyte
