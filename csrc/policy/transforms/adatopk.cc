// SPDX-License-Identifier: Apache-2.0
#include "adatopk.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr double kPays = 0.5;  // 8 bytes for each element kept, 4 for each that there is
constexpr int kDigits = 4;

std::string topk(double ratio) {
  char text[32];
  const auto end =
      std::to_chars(text, text + sizeof text, ratio, std::chars_format::general, kDigits).ptr;
  return "topk:" + std::string(text, end);
}

}  // namespace

std::vector<double> adatopk_ratios(std::span<const double> predicted_s, double least_ratio,
                                   double most_ratio) {
  if (!(least_ratio > 0 && least_ratio <= most_ratio && most_ratio <= 1)) {
    throw UsageError("adatopk: ratios must be 0 < least <= most <= 1");
  }
  double slowest_s = 0;
  for (double time_s : predicted_s) {
    if (!(time_s >= 0 && std::isfinite(time_s))) {
      throw UsageError("adatopk: predicted times must be finite and not negative");
    }
    slowest_s = std::max(slowest_s, time_s);
  }
  std::vector<double> ratios;
  for (double time_s : predicted_s) {
    const double ratio = time_s > 0 ? least_ratio * (slowest_s / time_s) : most_ratio;
    ratios.push_back(std::min(ratio, most_ratio));
  }
  return ratios;
}

std::vector<std::string> adatopk_codecs(std::span<const double> predicted_s, double least_ratio,
                                        double most_ratio) {
  std::vector<std::string> codecs;
  for (double ratio : adatopk_ratios(predicted_s, least_ratio, most_ratio)) {
    codecs.push_back(ratio > kPays ? "none" : topk(ratio));
  }
  return codecs;
}

}  // namespace usbyte
