#pragma once

#include <cstdint>
#include <span>

namespace usbyte {

/// Cost of one operation of m payload bytes: alpha + beta * m.
struct AlphaBeta {
  double alpha_s = 0;
  double beta_s_per_byte = 0;

  double time_s(int64_t bytes) const {
    return alpha_s + beta_s_per_byte * static_cast<double>(bytes);
  }
};

/// What the network costs `ranks` ranks, on the path that training uses.
struct NetworkModel {
  int ranks = 1;
  AlphaBeta all_reduce;
};

/// One measured operation.
struct Sample {
  int64_t bytes;
  double seconds;
};

/// Least-squares line through the samples with alpha >= 0 and beta >= 0. With a single size the
/// slope cannot be told from the startup; then all of the time is counted as beta. Throws
/// UsageError on no samples.
AlphaBeta fit_alpha_beta(std::span<const Sample> samples);

}  // namespace usbyte
