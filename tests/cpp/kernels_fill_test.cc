// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>

#include "cuda/emulation/host_kernels.h"
#include "kernel_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::Memory;
using test::message_of;
using test::Random;
using test::RunInShape;
using test::WriteCounter;

template <typename T>
void expect_filled(DType dtype, double value, T want) {
  for (int64_t skew = 0; skew < 16; skew += static_cast<int64_t>(sizeof(T))) {
    for (int64_t count : {0, 1, 2, 15, 16, 17, 31, 200}) {
      // A neighbour on either side must keep what it has.
      const int64_t size = sizeof(T);
      Memory memory((count + 2) * size, skew);
      for (RunInShape& run : test::shapes()) {
        std::ranges::fill(memory.bytes(), std::byte{0x77});
        kernels::fill(memory.data() + size, dtype, count, value, run);
        for (int64_t i = 0; i < count + 2; ++i) {
          T guard;
          std::memset(&guard, 0x77, sizeof guard);
          const T& expected = i == 0 || i == count + 1 ? guard : want;
          ASSERT_EQ(std::memcmp(memory.data() + i * size, &expected, sizeof(T)), 0)
              << name(dtype) << " at " << i << " of " << count << ", skew " << skew;
        }
      }
    }
  }
}

TEST(KernelsFill, WritesTheValueAndNothingElse) {
  expect_filled<float>(DType::float32, 0.1, 0.1F);
  expect_filled<double>(DType::float64, 0.1, 0.1);
  expect_filled<uint16_t>(DType::float16, -2.5, 0xc100);
  expect_filled<uint16_t>(DType::bfloat16, -2.5, 0xc020);
  expect_filled<int32_t>(DType::int32, -7, -7);
  expect_filled<int64_t>(DType::int64, -0x1p63, std::numeric_limits<int64_t>::min());
  expect_filled<int8_t>(DType::int8, -128, -128);
  expect_filled<uint8_t>(DType::uint8, 255, 255);
}

TEST(KernelsFill, EveryByteIsWrittenOnce) {
  Memory memory(4 * 77, 4);
  WriteCounter counter(memory.bytes());
  RunInShape run{5, 3};
  run.after_thread = std::ref(counter);
  kernels::fill(memory.data(), DType::int32, 77, -1, run);
  EXPECT_EQ(counter.counts(), std::vector<int>(4 * 77, 1));
}

TEST(KernelsFill, RefusesWhatTheTypeDoesNotHave) {
  int64_t place = 0;
  const auto fill = [&](DType dtype, double value) {
    return message_of<UsageError>([&] { host::fill(&place, dtype, 1, value); });
  };
  EXPECT_NE(fill(DType::uint8, -1).find("uint8"), std::string::npos);
  EXPECT_NE(fill(DType::int8, 128).find("int8"), std::string::npos);
  EXPECT_NE(fill(DType::int32, 0.5).find("int32"), std::string::npos);
  EXPECT_NE(fill(DType::int64, 0x1p63).find("int64"), std::string::npos);
  EXPECT_NE(fill(DType::int32, std::nan("")).find("int32"), std::string::npos);
}

template <typename T>
T number(double value) {
  return kernels::Arithmetic<T>::store(static_cast<typename kernels::Arithmetic<T>::Type>(value));
}

template <typename T>
void expect_scattered(DType dtype) {
  Random random(6);
  const auto size = static_cast<int64_t>(sizeof(T));
  for (int round = 0; round < 60; ++round) {
    const int64_t width = random.one_in(2) ? 16 / size * random(1, 5) : random(1, 9);
    const int64_t skew = random.one_in(2) ? 0 : random(0, 16 / size - 1) * size;
    const int64_t places = random(1, 30), count = random(0, 40);
    std::vector<int64_t> rows(static_cast<size_t>(count));
    for (int64_t& r : rows) r = random(0, places - 1);
    std::ranges::sort(rows);
    Memory target(places * width * size, skew), values(count * width * size, skew);
    for (T& v : target.as<T>()) v = number<T>(static_cast<double>(random(-999, 999)) / 7);
    for (T& v : values.as<T>()) v = number<T>(static_cast<double>(random(-999, 999)) / 7);
    const std::vector<T> before(target.as<T>().begin(), target.as<T>().end());
    std::vector<T> want = before;
    for (int64_t i = 0; i < count * width; ++i) {
      T& place =
          want[static_cast<size_t>(rows[static_cast<size_t>(i / width)] * width + i % width)];
      using A = kernels::Arithmetic<T>;
      place = A::store(A::load(place) + A::load(values.as<T>()[static_cast<size_t>(i)]));
    }
    for (RunInShape& run : test::shapes()) {
      std::ranges::copy(before, target.as<T>().begin());
      kernels::scatter_add(target.data(), rows.data(), values.data(), dtype, count, width, run);
      ASSERT_EQ(std::memcmp(want.data(), target.data(), want.size() * sizeof(T)), 0)
          << name(dtype) << ", round " << round << ", width " << width << ", " << run.blocks
          << " x " << run.threads;
    }
  }
}

TEST(KernelsScatterAdd, AddsEqualRowsInOrderInEveryShape) {
  expect_scattered<float>(DType::float32);
  expect_scattered<double>(DType::float64);
  expect_scattered<Half>(DType::float16);
  expect_scattered<BFloat16>(DType::bfloat16);
}

TEST(KernelsScatterAdd, OrderAndRoundingAreThoseOfTheDefinition) {
  // In another order, or rounded once at the end, the sum would be 2050.
  Half target{from_float<Half>(2048)};
  const Half values[] = {from_float<Half>(1), from_float<Half>(1)};
  const int64_t rows[] = {0, 0};
  host::scatter_add(&target, rows, values, DType::float16, 2, 1);
  EXPECT_EQ(to_float(target), 2048);
}

TEST(KernelsScatterAdd, RefusesIntegers) {
  int32_t memory = 0;
  const int64_t row = 0;
  EXPECT_NE(message_of<UsageError>([&] {
              host::scatter_add(&memory, &row, &memory, DType::int32, 1, 1);
            }).find("int32"),
            std::string::npos);
}

// Of floating-point numbers where there is a scale: else any bytes, which are those of NaNs, too.
template <typename T>
void expect_gathered(DType dtype, double scale) {
  Random random(7);
  const auto scaled = [scale](T value) {
    if constexpr (std::is_integral_v<T>) {
      return value;
    } else {
      using A = kernels::Arithmetic<T>;
      return A::store(A::load(value) * static_cast<typename A::Type>(scale));
    }
  };
  const auto size = static_cast<int64_t>(sizeof(T));
  for (int round = 0; round < 60; ++round) {
    const int64_t width = random.one_in(2) ? 16 / size * random(1, 5) : random(1, 9);
    const int64_t skew = random.one_in(2) ? 0 : random(0, 16 / size - 1) * size;
    const int64_t places = random(1, 30), count = random(0, 40);
    std::vector<int32_t> positions(static_cast<size_t>(count));
    for (int32_t& p : positions) p = static_cast<int32_t>(random(0, places - 1));
    Memory source(places * width * size, skew), target(count * width * size, skew);
    if constexpr (std::is_integral_v<T>) {
      for (std::byte& b : source.bytes()) b = static_cast<std::byte>(random(0, 255));
    } else {
      for (T& v : source.as<T>()) v = number<T>(static_cast<double>(random(-999, 999)) / 7);
    }
    std::vector<T> want;
    for (int32_t p : positions) {
      for (int64_t e = p * width; e < (p + 1) * width; ++e) {
        want.push_back(scaled(source.as<T>()[static_cast<size_t>(e)]));
      }
    }
    for (RunInShape& run : test::shapes()) {
      std::ranges::fill(target.bytes(), std::byte{0x77});
      kernels::gather_rows(target.data(), source.data(), positions.data(), dtype, count, width,
                           scale, run);
      ASSERT_EQ(std::memcmp(want.data(), target.data(), want.size() * sizeof(T)), 0)
          << name(dtype) << ", round " << round << ", width " << width << ", " << run.blocks
          << " x " << run.threads;
    }
  }
}

TEST(KernelsGatherRows, CopiesRowsOfEveryType) {
  expect_gathered<uint8_t>(DType::int8, 1);
  expect_gathered<uint16_t>(DType::bfloat16, 1);
  expect_gathered<uint32_t>(DType::float32, 1);
  expect_gathered<uint64_t>(DType::int64, 1);
}

TEST(KernelsGatherRows, MultipliesFloatingPointNumbers) {
  for (double scale : {0.3, -7.0, 0.0}) {
    expect_gathered<float>(DType::float32, scale);
    expect_gathered<double>(DType::float64, scale);
    expect_gathered<Half>(DType::float16, scale);
    expect_gathered<BFloat16>(DType::bfloat16, scale);
  }
}

TEST(KernelsGatherRows, EveryByteIsWrittenOnce) {
  Memory source(40 * 12, 0), target(77 * 12, 4);
  std::ranges::fill(source.bytes(), std::byte{1});
  WriteCounter counter(target.bytes());
  RunInShape run{5, 3};
  run.after_thread = std::ref(counter);
  std::vector<int32_t> positions(77);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i / 2);
  kernels::gather_rows(target.data(), source.data(), positions.data(), DType::int32, 77, 3, 1, run);
  EXPECT_EQ(counter.counts(), std::vector<int>(77 * 12, 1));
}

TEST(KernelsGatherRows, RefusesToMultiplyIntegers) {
  int32_t from = 0, to = 0;
  const int32_t position = 0;
  EXPECT_NE(message_of<UsageError>([&] {
              host::gather_rows(&to, &from, &position, DType::int32, 1, 1, 2);
            }).find("int32"),
            std::string::npos);
}

}  // namespace
}  // namespace usbyte
