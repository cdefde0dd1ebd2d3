// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda.h"
#include "cuda/emulation/host_kernels.h"
#include "usbyte/codec.h"

// What bench_pack measures: the kernels, on blocks that are cut out of a list of tensors.
namespace usbyte::bench {

constexpr int64_t kTensorAlignment = 512;  // bytes, as torch's allocator has it
constexpr int64_t kRowWidth = 64;          // elements

// Regions that the ops work on. Tensors lie in the first three, in the same places, and the flat
// buffer in the last.
enum Region { kParams, kFirstState, kSecondState, kFlatBuffer, kRegions };

struct Bytes {
  int64_t begin = 0, end = 0;
};

// A list's tensors as far as they are used, and their places.
struct Layout {
  std::vector<int64_t> counts;  // elements
  std::vector<int64_t> places;  // bytes
  int64_t elements = 0;
  int64_t bytes = 0;

  Layout(std::vector<int64_t> list, int64_t most_bytes) : counts(std::move(list)) {
    // From the end: the beginning of gpt2 is one large tensor.
    elements = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    while (elements * 4 - counts.front() * 4 >= most_bytes) {
      elements -= counts.front();
      counts.erase(counts.begin());
    }
    const int64_t rest = elements - std::min(elements, most_bytes / 4);
    counts.front() -= rest;
    elements -= rest;
    for (int64_t count : counts) {
      places.push_back(bytes);
      bytes += (count * 4 + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    }
  }
};

// A part of one tensor that belongs to a block.
struct Part {
  int64_t place, offset, count;  // bytes in a tensors' region; elements into the block; elements
};

struct Block {
  int64_t begin = 0, count = 0;  // elements of the flat buffer
  std::vector<Part> parts;

  Block(const Layout& layout, int64_t first, int64_t elements) : begin(first), count(elements) {
    int64_t at = 0;
    for (size_t i = 0; i < layout.counts.size(); at += layout.counts[i++]) {
      const int64_t low = std::max(begin, at);
      const int64_t high = std::min(begin + count, at + layout.counts[i]);
      if (low < high) parts.push_back({layout.places[i] + (low - at) * 4, low - begin, high - low});
    }
  }
  Bytes range(Region region) const {
    if (region == kFlatBuffer) return {begin * 4, (begin + count) * 4};
    return {parts.front().place, parts.back().place + parts.back().count * 4};
  }
};

// Where the regions lie for a run: on the device whole, on the host the ranges that are checked.
struct Regions {
  std::array<std::byte*, kRegions> base{};
  std::array<int64_t, kRegions> origin{};  // bytes of the region before `base`
  const int64_t* rows = nullptr;           // of scatter_add
  const int32_t* positions = nullptr;      // of gather_rows

  void* at(Region region, int64_t byte) const { return base[region] + (byte - origin[region]); }
};

// One set of kernels under both roofs, so that an op is written once.
struct OnDevice {
  Cuda& cuda;
  CudaStream stream;

  template <typename... T>
  void copy_segments(const T&... args) const {
    cuda.copy_segments(args..., stream);
  }
  template <typename... T>
  void fill(const T&... args) const {
    cuda.fill(args..., stream);
  }
  template <typename... T>
  void scatter_add(const T&... args) const {
    cuda.scatter_add(args..., stream);
  }
  template <typename... T>
  void gather_rows(const T&... args) const {
    cuda.gather_rows(args..., stream);
  }
  template <typename... T>
  void encode_groups(const T&... args) const {
    cuda.encode_groups(args..., stream);
  }
  template <typename... T>
  void decode_groups(const T&... args) const {
    cuda.decode_groups(args..., stream);
  }
  template <typename... T>
  void update_sgd(const T&... args) const {
    cuda.update_sgd(args..., stream);
  }
  template <typename... T>
  void update_adam(const T&... args) const {
    cuda.update_adam(args..., stream);
  }
};
struct OnHost {
  static constexpr auto copy_segments = host::copy_segments;
  static constexpr auto fill = host::fill;
  static constexpr auto scatter_add = host::scatter_add;
  static constexpr auto gather_rows = host::gather_rows;
  static constexpr auto encode_groups = host::encode_groups;
  static constexpr auto decode_groups = host::decode_groups;
  static constexpr auto update_sgd = host::update_sgd;
  static constexpr auto update_adam = host::update_adam;
};

struct Op {
  std::string name;
  double bytes_per_element;  // read and written
  std::function<void(const OnDevice&, const Regions&, const Block&)> on_device;
  std::function<void(const OnHost&, const Regions&, const Block&)> on_host;

  template <typename Run>
  Op(std::string op, double bytes, Run run)
      : name(std::move(op)), bytes_per_element(bytes), on_device(run), on_host(run) {}
};

inline Op pack(const std::string& name, DType flat_buffer) {
  return {name, 4.0 + static_cast<double>(itemsize(flat_buffer)),
          [=](const auto& kernels, const Regions& memory, const Block& block) {
            std::vector<CopySegment> segments;
            for (const Part& p : block.parts) {
              segments.push_back(
                  {memory.at(kParams, p.place),
                   memory.at(kFlatBuffer, block.begin * 4 + p.offset * itemsize(flat_buffer)),
                   p.count});
            }
            kernels.copy_segments(segments, DType::float32, flat_buffer, 1.0);
          }};
}

inline Op unpack(const std::string& name, DType flat_buffer) {
  return {name, 4.0 + static_cast<double>(itemsize(flat_buffer)),
          [=](const auto& kernels, const Regions& memory, const Block& block) {
            std::vector<CopySegment> segments;
            for (const Part& p : block.parts) {
              segments.push_back(
                  {memory.at(kFlatBuffer, block.begin * 4 + p.offset * itemsize(flat_buffer)),
                   memory.at(kParams, p.place), p.count});
            }
            kernels.copy_segments(segments, flat_buffer, DType::float32, 1.0);
          }};
}

inline Op sgd() {
  return {"sgd", 20, [](const auto& kernels, const Regions& memory, const Block& block) {
            std::vector<SgdTensor> tensors;
            for (const Part& p : block.parts) {
              tensors.push_back({memory.at(kParams, p.place),
                                 memory.at(kFlatBuffer, (block.begin + p.offset) * 4),
                                 memory.at(kFirstState, p.place), p.count, false});
            }
            const SgdOptions options{.lr = 0.1, .momentum = 0.9, .weight_decay = 1e-4};
            kernels.update_sgd(tensors, DType::float32, options);
          }};
}

inline Op adam() {
  return {"adam", 28, [](const auto& kernels, const Regions& memory, const Block& block) {
            std::vector<AdamTensor> tensors;
            for (const Part& p : block.parts) {
              tensors.push_back({memory.at(kParams, p.place),
                                 memory.at(kFlatBuffer, (block.begin + p.offset) * 4),
                                 memory.at(kFirstState, p.place), memory.at(kSecondState, p.place),
                                 p.count, 7});
            }
            const AdamOptions options{.lr = 1e-3,
                                      .beta1 = 0.9,
                                      .beta2 = 0.999,
                                      .eps = 1e-8,
                                      .weight_decay = 0.01,
                                      .decoupled = true};
            kernels.update_adam(tensors, DType::float32, options);
          }};
}

inline Op fill() {
  return {"fill", 4, [](const auto& kernels, const Regions& memory, const Block& block) {
            kernels.fill(memory.at(kFlatBuffer, block.begin * 4), DType::float32, block.count, 0.5);
          }};
}

inline Op scatter_add() {
  const double rows = 8.0 / kRowWidth;
  return {"scatter_add", 4 + 8.0 / 3 + rows,
          [](const auto& kernels, const Regions& memory, const Block& block) {
            kernels.scatter_add(memory.at(kFlatBuffer, block.begin * 4), memory.rows,
                                memory.at(kParams, block.range(kParams).begin), DType::float32,
                                block.count / kRowWidth, kRowWidth);
          }};
}

inline Op gather_rows() {
  return {"gather_rows", 8 + 4.0 / kRowWidth,
          [](const auto& kernels, const Regions& memory, const Block& block) {
            const int64_t pairs = block.count / kRowWidth / 2;
            kernels.gather_rows(memory.at(kFlatBuffer, block.begin * 4),
                                memory.at(kParams, block.range(kParams).begin), memory.positions,
                                DType::float32, 2 * pairs, kRowWidth, 0.5);
          }};
}

// Bytes of a message for each element of a long run.
inline double message_share(const Codec& codec) {
  constexpr int64_t kLong = 1 << 20;
  return static_cast<double>(codec.message_bytes(kLong)) / kLong;
}

// As training sends a block: with what is remembered of it, if the codec does. Without its first
// `skipped` elements.
inline Op send(const std::string& spec, int64_t skipped) {
  const std::shared_ptr<const Codec> codec = make_codec(spec);
  const bool keeps = codec->state_rows() > 0;
  return {"send " + spec + (skipped > 0 ? ", odd" : ""),
          4 + message_share(*codec) + (keeps ? 8 : 0),
          [=](const auto& kernels, const Regions& memory, const Block& block) {
            const int64_t place = block.range(kFirstState).begin;
            void* const kept = memory.at(kFirstState, place + 4 * skipped);
            const GroupEncoding run{memory.at(kFlatBuffer, (block.begin + skipped) * 4),
                                    keeps ? static_cast<float*>(kept) : nullptr,
                                    static_cast<std::byte*>(memory.at(kSecondState, place)),
                                    block.count - skipped, 1};
            kernels.encode_groups(*codec->kernels(), std::span(&run, 1), DType::float32);
          }};
}

// The sum of two ranks' messages, likewise.
inline Op receive(const std::string& spec, int64_t skipped) {
  const std::shared_ptr<const Codec> codec = make_codec(spec);
  return {"receive " + spec + (skipped > 0 ? ", odd" : ""), 4 + 2 * message_share(*codec),
          [=](const auto& kernels, const Regions& memory, const Block& block) {
            const int64_t place = block.range(kSecondState).begin;
            const GroupDecoding run{memory.at(kFlatBuffer, (block.begin + skipped) * 4),
                                    static_cast<const std::byte*>(memory.at(kSecondState, place)),
                                    block.count - skipped};
            kernels.decode_groups(*codec->kernels(), std::span(&run, 1), DType::float32, 2,
                                  codec->message_bytes(run.count));
          }};
}

}  // namespace usbyte::bench
