// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

namespace usbyte {

/// Never destroys `object`: another thread, a device or a network may still use its memory, and
/// nothing tells when that ends.
void keep_forever(std::shared_ptr<void> object);

}  // namespace usbyte
