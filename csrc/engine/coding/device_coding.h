// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "coded_op.h"
#include "cuda/cuda.h"

namespace usbyte {

/// Zeros on the host, for as long as this object lives; page-locked where they are copied to a
/// device.
class HostBytes {
 public:
  HostBytes() = default;
  HostBytes(const std::shared_ptr<Cuda>& device, int64_t bytes);

  std::byte* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  std::shared_ptr<std::byte> data_;
  int64_t size_ = 0;
};

/// As `make_coded_ops`, of those ops that are `wanted`; flat buffer and state are the host's, and
/// messages page-locked if there is a device.
std::vector<std::unique_ptr<CodedOp>> make_host_coded_ops(
    const CodingSpace& space, const std::function<bool(const Op&, const Codec&)>& wanted);
/// As `make_coded_ops`, where there is one.
std::vector<std::unique_ptr<CodedOp>> make_device_coded_ops(const CodingSpace& space);

}  // namespace usbyte
