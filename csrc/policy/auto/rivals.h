// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "usbyte/policy.h"

namespace usbyte {

/// Calls `found` with the plans of all other policies: at the sizes of `options`, and at the sizes
/// that users and tuners choose from.
///
/// - `ddp`: every bucket size that makes a difference. With n > 64 tensors two sizes are
///   (n - 64) / 20,000 of the smaller one apart, and those of `tuned_sizes` are tried as well.
/// - `bytescheduler`: partition and credit on the grid of `tuned_sizes`, the credit no smaller.
/// - `us-byte`, `dcredit`: units from 64 KiB to 32 MiB, by powers of two, of up to 1,000 tensors.
/// - `dear`: nothing more, since `dear_exact` tries every fusion size.
///
/// With codecs, the plans of policies that do not know them get them afterwards. Left out are plans
/// of very many parts, whose simulation takes too long, and, with codecs that take two rounds,
/// `bytecomp`, which has no strategy for them.
void for_each_rival(const Profile& profile, const NetworkModel& network,
                    const PolicyOptions& options, const std::function<void(Plan)>& found);

/// Sizes in bytes from 1 MiB to 256 MiB, two to each power of two.
const std::vector<int64_t>& tuned_sizes();

}  // namespace usbyte
