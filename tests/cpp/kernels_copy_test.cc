// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>

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

struct Case {
  DType from, to;
  double scale;
};

std::string text(const Case& c) {
  return std::string(name(c.from)) + " to " + std::string(name(c.to)) + " times " +
         std::to_string(c.scale);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (DType t : {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int32,
                  DType::int64, DType::int8, DType::uint8}) {
    all.push_back({t, t, 1});
  }
  for (DType from : {DType::float32, DType::float16, DType::bfloat16}) {
    for (DType to : {DType::float32, DType::float16, DType::bfloat16}) {
      if (from != to) all.push_back({from, to, 1});
      all.push_back({from, to, 1.0 / 3});
    }
  }
  all.push_back({DType::float64, DType::float64, 1.0 / 3});
  return all;
}

float load(DType dtype, const std::byte* at) {
  if (dtype == DType::float32) return *reinterpret_cast<const float*>(at);
  if (dtype == DType::float16) return to_float(*reinterpret_cast<const Half*>(at));
  return to_float(*reinterpret_cast<const BFloat16*>(at));
}

template <typename T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

void store(DType dtype, std::byte* at, float value) {
  if (dtype == DType::float32) return store(at, value);
  if (dtype == DType::float16) return store(at, from_float<Half>(value));
  store(at, from_float<BFloat16>(value));
}

// One element after the other: what all else must agree with.
void reference_copy(const CopySegment& s, const Case& c) {
  const auto* source = static_cast<const std::byte*>(s.source);
  auto* target = static_cast<std::byte*>(s.target);
  for (int64_t i = 0; i < s.count; ++i) {
    const std::byte* from = source + i * itemsize(c.from);
    std::byte* to = target + i * itemsize(c.to);
    if (c.from == c.to && c.scale == 1) {
      std::memcpy(to, from, static_cast<size_t>(itemsize(c.to)));
    } else if (c.from == DType::float64) {
      store(to, *reinterpret_cast<const double*>(from) * c.scale);
    } else {
      store(c.to, to, load(c.from, from) * static_cast<float>(c.scale));
    }
  }
}

void fill_randomly(std::span<std::byte> memory, DType dtype, Random& random) {
  const int64_t size = itemsize(dtype);
  const bool floats = dtype == DType::float32 || dtype == DType::float64;
  for (size_t i = 0; i + static_cast<size_t>(size) <= memory.size();
       i += static_cast<size_t>(size)) {
    if (dtype == DType::float32) {
      store(memory.data() + i, static_cast<float>(test::random_number(random)));
    } else if (dtype == DType::float64) {
      store(memory.data() + i, test::random_number(random));
    }
  }
  if (floats) return;
  for (std::byte& b : memory) b = static_cast<std::byte>(random(0, 255));
}

// Arrays that are packed into a flat buffer, with gaps in it, at any alignment of either side.
class Job {
 public:
  Job(const Case& c, const std::vector<int64_t>& counts, Random& random) : case_(c) {
    const int64_t from = itemsize(c.from), to = itemsize(c.to);
    int64_t flat_buffer_bytes = 0;
    std::vector<int64_t> offsets;
    for (int64_t count : counts) {
      if (random.one_in(3)) flat_buffer_bytes += random(0, 20) * to;
      offsets.push_back(flat_buffer_bytes);
      flat_buffer_bytes += count * to;
    }
    flat_buffer_ = std::make_unique<Memory>(flat_buffer_bytes + random(0, 3) * to,
                                            random(0, 16 / to - 1) * to);
    for (size_t i = 0; i < counts.size(); ++i) {
      sources_.push_back(
          std::make_unique<Memory>(counts[i] * from, random(0, 16 / from - 1) * from));
      fill_randomly(sources_.back()->bytes(), c.from, random);
      segments_.push_back({sources_.back()->data(), flat_buffer_->data() + offsets[i], counts[i]});
    }
    // The opposite of what will be written: every write shows, and so does a missing one.
    clear();
    for (const CopySegment& s : segments_) reference_copy(s, case_);
    want_.assign(flat_buffer().begin(), flat_buffer().end());
    written_.assign(want_.size(), 0);
    for (const CopySegment& s : segments_) {
      const auto begin = static_cast<std::byte*>(s.target) - flat_buffer().data();
      std::fill_n(written_.begin() + begin, s.count * to, 1);
    }
    clear();
  }

  void clear() {
    for (size_t i = 0; i < flat_buffer().size(); ++i) {
      flat_buffer()[i] = want_.empty() ? std::byte{0x5a} : written_[i] ? ~want_[i] : want_[i];
    }
  }
  std::span<std::byte> flat_buffer() { return flat_buffer_->bytes(); }
  std::span<const CopySegment> segments() const { return segments_; }
  const std::vector<std::byte>& want() const { return want_; }
  /// 1 for the bytes of the flat buffer that belong to a segment.
  const std::vector<int>& written() const { return written_; }
  template <typename Run>
  void copy(Run& run) {
    kernels::copy_segments(segments_, case_.from, case_.to, case_.scale, run);
  }

 private:
  Case case_;
  std::unique_ptr<Memory> flat_buffer_;
  std::vector<std::unique_ptr<Memory>> sources_;
  std::vector<CopySegment> segments_;
  std::vector<std::byte> want_;
  std::vector<int> written_;
};

std::vector<int64_t> random_counts(Random& random) {
  std::vector<int64_t> counts(static_cast<size_t>(random(1, 12)));
  for (int64_t& c : counts) {
    c = random.one_in(4) ? random(0, 2) : random.one_in(4) ? random(100, 1500) : random(3, 70);
  }
  return counts;
}

bool same(std::span<const std::byte> a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), b.size()) == 0;
}

TEST(KernelsCopy, EveryByteIsRightInEveryShape) {
  Random random(1);
  for (const Case& c : cases()) {
    for (int round = 0; round < 25; ++round) {
      Job job(c, random_counts(random), random);
      for (RunInShape& run : test::shapes()) {
        job.clear();
        job.copy(run);
        ASSERT_TRUE(same(job.flat_buffer(), job.want()))
            << text(c) << ", round " << round << ", " << run.blocks << " x " << run.threads;
      }
    }
  }
}

// No two threads write one byte: what a race detector would look for on the device.
TEST(KernelsCopy, EveryByteIsWrittenOnce) {
  Random random(2);
  for (const Case& c : cases()) {
    for (int round = 0; round < 4; ++round) {
      Job job(c, random_counts(random), random);
      for (RunInShape run : {RunInShape{1, 32}, RunInShape{5, 7}}) {
        job.clear();
        WriteCounter counter(job.flat_buffer());
        run.after_thread = std::ref(counter);
        job.copy(run);
        ASSERT_EQ(counter.counts(), job.written()) << text(c) << ", round " << round;
      }
    }
  }
}

TEST(KernelsCopy, EveryAlignmentOfBothSidesAndEveryLength) {
  Random random(3);
  for (int64_t skew_from = 0; skew_from < 16; ++skew_from) {
    for (int64_t skew_to = 0; skew_to < 16; ++skew_to) {
      for (int64_t count = 0; count <= 67; ++count) {
        Memory source(count, skew_from), target(count, skew_to);
        fill_randomly(source.bytes(), DType::uint8, random);
        const CopySegment segment{source.data(), target.data(), count};
        host::copy_segments({&segment, 1}, DType::uint8, DType::uint8, 1);
        ASSERT_TRUE(std::ranges::equal(source.bytes(), target.bytes()))
            << skew_from << " to " << skew_to << ", " << count << " bytes";
      }
    }
  }
}

TEST(KernelsCopy, ListsThatFillTables) {
  Random random(4);
  for (int64_t segments : {160, 167, 168, 169, 1023, 1024, 1400, 2800}) {
    std::vector<int64_t> counts(static_cast<size_t>(segments));
    for (int64_t& c : counts) c = random(1, 9);
    Job job({DType::float32, DType::bfloat16, 1}, counts, random);
    for (bool large : {false, true}) {
      RunInShape run{3, 64, large};
      job.clear();
      job.copy(run);
      EXPECT_TRUE(same(job.flat_buffer(), job.want())) << segments;
      const int64_t capacity = large ? kSegmentsPerLaunch : 160;
      EXPECT_LE(run.launches, (segments + capacity - 1) / capacity) << segments;
    }
  }
}

TEST(KernelsCopy, UnpacksWhatItPacked) {
  Random random(5);
  std::vector<std::unique_ptr<Memory>> tensors, copies;
  std::vector<CopySegment> pack, unpack;
  Memory flat_buffer(10000, 12);
  int64_t offset = 0;
  for (int64_t count : {1, 64, 7, 1000, 0, 333, 64}) {
    tensors.push_back(std::make_unique<Memory>(count * 4, random(0, 3) * 4));
    copies.push_back(std::make_unique<Memory>(count * 4, random(0, 3) * 4));
    fill_randomly(tensors.back()->bytes(), DType::float32, random);
    // A cut inside each tensor, as between two blocks.
    for (auto [begin, end] : {std::pair{int64_t{0}, count / 3}, {count / 3, count}}) {
      pack.push_back(
          {tensors.back()->data() + begin * 4, flat_buffer.data() + offset, end - begin});
      unpack.push_back(
          {flat_buffer.data() + offset, copies.back()->data() + begin * 4, end - begin});
      offset += (end - begin) * 4;
    }
  }
  host::copy_segments(pack, DType::float32, DType::float32, 1);
  host::copy_segments(unpack, DType::float32, DType::float32, 1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(std::ranges::equal(tensors[i]->bytes(), copies[i]->bytes())) << i;
  }
}

TEST(KernelsCopy, ScalesInPlace) {
  Memory memory(4 * 1003, 4);
  std::iota(memory.as<float>().begin(), memory.as<float>().end(), 1.0F);
  const CopySegment segment{memory.data(), memory.data(), 1003};
  host::copy_segments({&segment, 1}, DType::float32, DType::float32, 0.25);
  for (size_t i = 0; i < 1003; ++i) {
    ASSERT_EQ(memory.as<float>()[i], 0.25F * static_cast<float>(i + 1));
  }
}

TEST(KernelsCopy, KeepsNaNsAndInfinitiesAndOverflowsToThem) {
  const float in[] = {NAN, INFINITY, -INFINITY, 65519.996F, 65520.0F, 1e38F, -1e38F};
  Half halves[7];
  CopySegment segment{in, halves, 7};
  host::copy_segments({&segment, 1}, DType::float32, DType::float16, 1);
  EXPECT_TRUE(std::isnan(to_float(halves[0])));
  const uint16_t want[] = {0x7fff, 0x7c00, 0xfc00, 0x7bff, 0x7c00, 0x7c00, 0xfc00};
  for (int i = 0; i < 7; ++i) EXPECT_EQ(halves[i].bits, want[i]) << i;
  float back[7];
  segment = {halves, back, 7};
  host::copy_segments({&segment, 1}, DType::float16, DType::float32, 2);
  EXPECT_TRUE(std::isnan(back[0]));
  EXPECT_EQ(back[1], INFINITY);
  EXPECT_EQ(back[3], 2 * 65504.0F);
}

// Takes kernels and runs none: what it is given may point to nothing.
struct Recorder {
  std::vector<CopySegment> seen;
  int launches = 0;
  static bool large_tables() { return true; }

  template <typename Kernel>
  void operator()(const Kernel& kernel) {
    ++launches;
    uint64_t pieces = 0;
    for (uint32_t i = 0; i < kernel.table.size; ++i) {
      const auto& e = kernel.table.entries[i];
      EXPECT_EQ(e.first_piece, pieces);
      pieces += e.pieces();
      seen.push_back({e.source, e.target, e.count});
    }
    EXPECT_EQ(kernel.table.pieces, pieces);
    EXPECT_LE(pieces, uint64_t{1} << 31);
  }
};

TEST(KernelsCopy, HugeSegmentsAreSplit) {
  const auto* source = reinterpret_cast<const double*>(uintptr_t{1} << 44);
  auto* target = reinterpret_cast<double*>((uintptr_t{1} << 45) + 8);
  const int64_t count = (int64_t{9} << 30) + 5;
  const CopySegment segment{source, target, count};
  Recorder recorder;
  kernels::copy_segments({&segment, 1}, DType::float64, DType::float64, 1, recorder);
  EXPECT_GT(recorder.launches, 1);
  int64_t done = 0;
  for (const CopySegment& s : recorder.seen) {
    EXPECT_EQ(s.source, source + done);
    EXPECT_EQ(s.target, target + done);
    done += s.count;
  }
  EXPECT_EQ(done, count);
}

TEST(KernelsCopy, NothingIsLaunchedForNothing) {
  RunInShape run{1, 1};
  kernels::copy_segments({}, DType::float32, DType::float32, 1, run);
  const CopySegment empty{nullptr, nullptr, 0};
  kernels::copy_segments({&empty, 1}, DType::float32, DType::float32, 1, run);
  kernels::fill(nullptr, DType::float32, 0, 0, run);
  kernels::scatter_add(nullptr, nullptr, nullptr, DType::float32, 0, 5, run);
  EXPECT_EQ(run.launches, 0);
}

TEST(KernelsCopy, RefusesWhatItCannotDo) {
  float memory[4] = {};
  const auto copy = [&](CopySegment s, DType from, DType to, double scale) {
    return message_of<UsageError>([&] { host::copy_segments({&s, 1}, from, to, scale); });
  };
  EXPECT_NE(copy({memory, memory, 1}, DType::int32, DType::int32, 2).find("int32"),
            std::string::npos);
  EXPECT_NE(copy({memory, memory, 1}, DType::float32, DType::float64, 1).find("float64"),
            std::string::npos);
  EXPECT_NE(copy({memory, memory, 1}, DType::int64, DType::float32, 1).find("int64"),
            std::string::npos);
  EXPECT_NE(copy({memory, memory, -1}, DType::float32, DType::float32, 1).find("-1"),
            std::string::npos);
  EXPECT_NE(copy({nullptr, memory, 1}, DType::float32, DType::float32, 1).find("source"),
            std::string::npos);
  const auto* odd = reinterpret_cast<const std::byte*>(memory) + 2;
  EXPECT_NE(copy({odd, memory, 1}, DType::float32, DType::float32, 1).find("aligned"),
            std::string::npos);
}

}  // namespace
}  // namespace usbyte
