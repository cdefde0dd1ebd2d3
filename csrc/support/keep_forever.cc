// SPDX-License-Identifier: Apache-2.0
#include "keep_forever.h"

#include <mutex>
#include <utility>
#include <vector>

namespace usbyte {

void keep_forever(std::shared_ptr<void> object) {
  // Not destroyed at exit either.
  static auto& objects = *new std::vector<std::shared_ptr<void>>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  objects.push_back(std::move(object));
}

}  // namespace usbyte
