// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

namespace usbyte {

/// AdaTopK: the share of a gradient that is kept is smallest where sending takes longest, so that
/// quality is given up only where it buys time. Tang et al., "FusionLLM: A Decentralized LLM
/// Training System on Geo-distributed GPUs with Adaptive Compression", 2024 (arXiv 2410.12707).
///
/// `predicted_s` is what sending each link or tensor takes uncompressed, s. By how much it is
/// compressed is proportional to that: the slowest keeps `least_ratio`, one that takes half as long
/// twice as much, none more than `most_ratio`. All keep `most_ratio` if nothing takes any time.
/// Throws UsageError unless 0 < least_ratio <= most_ratio <= 1 and times are finite and not
/// negative.
std::vector<double> adatopk_ratios(std::span<const double> predicted_s, double least_ratio,
                                   double most_ratio = 1);

/// The same as codecs: "topk:RATIO", and "none" where an index and a value for each element kept
/// are no fewer bytes than all float32 values, above a ratio of 1/2.
std::vector<std::string> adatopk_codecs(std::span<const double> predicted_s, double least_ratio,
                                        double most_ratio = 1);

}  // namespace usbyte
