// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

// Elements of each parameter of known models, in the order of their definition, which is about that
// of the forward pass.
namespace usbyte::bench {

/// torchvision's resnet50: 161 tensors, 25 557 032 elements.
inline std::vector<int64_t> resnet50() {
  std::vector<int64_t> out;
  const auto convolution = [&](int64_t in, int64_t channels, int64_t kernel) {
    out.push_back(in * channels * kernel * kernel);
    out.push_back(channels);  // batch norm
    out.push_back(channels);
  };
  convolution(3, 64, 7);
  int64_t in = 64, width = 64;
  for (int blocks : {3, 4, 6, 3}) {
    for (int block = 0; block < blocks; ++block) {
      convolution(in, width, 1);
      convolution(width, width, 3);
      convolution(width, 4 * width, 1);
      if (block == 0) convolution(in, 4 * width, 1);
      in = 4 * width;
    }
    width *= 2;
  }
  out.push_back(in * 1000);
  out.push_back(1000);
  return out;
}

/// GPT-2 of 124 million parameters: 148 tensors, 124 439 808 elements.
inline std::vector<int64_t> gpt2() {
  constexpr int64_t kWidth = 768;
  std::vector<int64_t> out = {50257 * kWidth, 1024 * kWidth};
  const auto layer_norm = [&] { out.insert(out.end(), {kWidth, kWidth}); };
  const auto linear = [&](int64_t in, int64_t to) { out.insert(out.end(), {in * to, to}); };
  for (int layer = 0; layer < 12; ++layer) {
    layer_norm();
    linear(kWidth, 3 * kWidth);
    linear(kWidth, kWidth);
    layer_norm();
    linear(kWidth, 4 * kWidth);
    linear(4 * kWidth, kWidth);
  }
  layer_norm();
  return out;
}

}  // namespace usbyte::bench
