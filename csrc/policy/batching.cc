#include "batching.h"

#include <algorithm>
#include <limits>

namespace usbyte {

Batching batch_exactly(std::span<const double> length_s, std::span<const double> due_s,
                       double startup_s, double least_s) {
  const size_t n = length_s.size();
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // best[j]: least lateness of jobs j, j + 1, ... if the channel is free at time 0.
  std::vector<double> best(n + 1, kNever);
  std::vector<size_t> next(n + 1, n);
  best[n] = -kNever;
  for (size_t j = n; j-- > 0;) {
    double sum = startup_s;
    for (size_t k = j + 1; k <= n; ++k) {
      sum += length_s[k - 1];
      const double busy = std::max(sum, least_s);
      const double lateness = std::max(best[k] + busy, busy - due_s[j]);
      // Among equals the longer batch: fewer startups.
      if (lateness <= best[j]) {
        best[j] = lateness;
        next[j] = k;
      }
      if (busy - due_s[j] > best[j]) break;  // and it only grows
    }
  }
  Batching out{n ? best[0] : 0, {}};
  for (size_t j = 0; j < n; j = next[j]) out.begins.push_back(static_cast<int>(j));
  return out;
}

}  // namespace usbyte
