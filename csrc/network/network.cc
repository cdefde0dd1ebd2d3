#include "usbyte/network.h"

#include <algorithm>

#include "usbyte/error.h"

namespace usbyte {

AlphaBeta fit_alpha_beta(std::span<const Sample> samples) {
  if (samples.empty()) throw UsageError("fit_alpha_beta: no samples");
  const double n = static_cast<double>(samples.size());
  double mean_x = 0, mean_y = 0;
  for (const Sample& s : samples) {
    mean_x += static_cast<double>(s.bytes) / n;
    mean_y += s.seconds / n;
  }
  double xx = 0, xy = 0, origin_xx = 0, origin_xy = 0;
  for (const Sample& s : samples) {
    const double x = static_cast<double>(s.bytes);
    xx += (x - mean_x) * (x - mean_x);
    xy += (x - mean_x) * (s.seconds - mean_y);
    origin_xx += x * x;
    origin_xy += x * s.seconds;
  }
  const double beta = xx > 0 ? xy / xx : 0;
  const double alpha = mean_y - beta * mean_x;
  // Outside the feasible quadrant the constrained optimum lies on one of its edges.
  if (xx > 0 && beta < 0) return {std::max(mean_y, 0.0), 0};
  if (xx <= 0 || alpha < 0) return {0, origin_xx > 0 ? std::max(origin_xy / origin_xx, 0.0) : 0};
  return {alpha, beta};
}

}  // namespace usbyte
