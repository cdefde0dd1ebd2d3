#pragma once

#include <cstring>
#include <type_traits>

#include "group_formats.h"
#include "table.h"
#include "team.h"

// Messages of codecs that work by groups; see codec/grouped.h for how they are laid out.
namespace usbyte::kernels {

constexpr uint32_t kQuad = 4;  ///< neighbouring elements that a lane reads at a time

/// The bits of a lane's quad.
template <uint32_t Bits>
using QuadBits = std::conditional_t<Bits == 16, uint64_t, uint32_t>;

/// A run of elements and its message. `first_piece` counts groups where it is encoded, quads where
/// it is decoded.
template <typename Value, typename Byte>
struct GroupRun {
  Value* values;
  Byte* numbers;
  Byte* packed;
  uint32_t count;  // elements
  uint32_t first_piece;
};

template <typename Format, typename T>
struct EncodeEntry : GroupRun<const T, std::byte> {
  float* kept;  ///< what is remembered; null without
  uint64_t key;

  USBYTE_HD uint32_t pieces() const {
    return (this->count + Format::kElements - 1) / Format::kElements;
  }
};

/// Each team encodes a group: with what is kept, of which it takes away what is sent.
template <typename Format, typename T>
struct EncodeWork {
  static constexpr uint32_t kElements = Format::kElements, kBits = Format::kBits;
  static constexpr uint32_t kNumbers = Format::kNumbers;
  /// A lane's quads, of which so many are neighbours that their bits are whole bytes.
  static constexpr uint32_t kQuads = kElements / kLanes / kQuad;
  static constexpr uint32_t kTogether = kBits == 1 ? 2 : 1;
  static constexpr uint32_t N = kQuads < 4 ? kQuads : 4;  // of them fetched at a time

  using Entry = EncodeEntry<Format, T>;
  using Part = typename Format::Part;
  struct Lane {
    float x[kQuads][kQuad];
  };

  /// Memory is a running mean, of which the gradient becomes this share, instead of what is unsent;
  /// 0 if not.
  float fresh, old;
  Table<Entry, kSmallTableBytes> table;

  USBYTE_HD int64_t pieces() const { return table.pieces; }

  USBYTE_HD Part begin(uint32_t piece, uint32_t lane, Lane& state) const {
    const Entry& entry = table.entries[table.find(piece, 0, table.size - 1)];
    const uint32_t group = (piece - entry.first_piece) * kElements;
    Part part;
    USBYTE_UNROLL
    for (uint32_t batch = 0; batch < kQuads; batch += N) {
      Fetched<T, kQuad> values[N];
      Fetched<float, kQuad> kept[N];
      USBYTE_UNROLL
      for (uint32_t q = 0; q < N; ++q) {
        const auto at = static_cast<int32_t>(group + element(batch + q, lane));
        values[q].fetch(entry.values, at, entry.count);
        if (entry.kept) kept[q].fetch(entry.kept, at, entry.count);
      }
      USBYTE_UNROLL
      for (uint32_t q = 0; q < N; ++q) {
        T value[kQuad];
        float before[kQuad] = {};
        values[q].get(value);
        if (entry.kept) kept[q].get(before);
        USBYTE_UNROLL
        for (uint32_t i = 0; i < kQuad; ++i) {
          const float x = Arithmetic<T>::load(value[i]);
          const float taken = !entry.kept  ? x
                              : fresh != 0 ? multiply(old, before[i]) + multiply(fresh, x)
                                           : before[i] + x;
          state.x[batch + q][i] = taken;
          part.add(taken);
        }
      }
    }
    return part;
  }

  USBYTE_HD void end(uint32_t piece, uint32_t lane, const Lane& state, const Part& whole) const {
    const Entry& entry = table.entries[table.find(piece, 0, table.size - 1)];
    const uint32_t index = piece - entry.first_piece, group = index * kElements;
    const uint32_t rest = entry.count - group, count = rest < kElements ? rest : kElements;
    const typename Format::Sender sender({whole, count, entry.key + group});
    if constexpr (kNumbers > 0) {
      auto* const numbers = reinterpret_cast<float*>(entry.numbers) + index * kNumbers;
      USBYTE_UNROLL
      for (uint32_t k = 0; k < kNumbers; ++k) {
        if (lane == 0) numbers[k] = sender.numbers[k];
      }
    }
    QuadBits<kBits> word = 0;
    USBYTE_UNROLL
    for (uint32_t q = 0; q < kQuads; ++q) {
      const uint32_t at = element(q, lane);
      float after[kQuad];
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        const float x = state.x[q][i];
        const uint32_t code = at + i < count ? sender.code(x, at + i) : 0;
        word |= QuadBits<kBits>{code} << ((q % kTogether * kQuad + i) * kBits);
        after[i] = left(x, sender, code);
      }
      if (entry.kept) put(entry.kept, static_cast<int32_t>(group + at), entry.count, after);
      if (q % kTogether == kTogether - 1) {
        store(entry.packed + group / 8 * kBits, (at - q % kTogether * kQuad) * kBits / 8, count,
              word);
        word = 0;
      }
    }
  }

 private:
  /// Where in its group a lane's quad begins.
  USBYTE_HD static uint32_t element(uint32_t quad, uint32_t lane) {
    return (quad / kTogether * kLanes + lane) * kTogether * kQuad + quad % kTogether * kQuad;
  }

  /// See codec/message.h, `forget`.
  USBYTE_HD float left(float x, const typename Format::Sender& sender, uint32_t code) const {
    if (fresh != 0) return is_finite(x) ? x : 0;
    const float sent = Format::value(sender.numbers, code);
    bool finite = is_finite(sender.numbers[0]);
    if constexpr (kNumbers == 2) finite = finite && is_finite(sender.numbers[1]);
    return finite || is_finite(sent) ? x - sent : is_finite(x) ? x : 0;
  }

  /// A lane's bits, at that byte of its group's; those are filled up with zeros to 4 bytes.
  USBYTE_HD static void store(std::byte* packed, uint32_t at, uint32_t count,
                              QuadBits<kBits> word) {
    if constexpr (kBits == 16) {
      uint16_t codes[kQuad];
      memcpy(codes, &word, sizeof codes);
      return put(reinterpret_cast<uint16_t*>(packed), static_cast<int32_t>(at / 2), count, codes);
    }
    const uint32_t bytes = (count * kBits + 31) / 32 * 4;
    if (at >= bytes) return;
    if constexpr (kBits == 8) {
      *reinterpret_cast<uint32_t*>(packed + at) = word;
    } else if constexpr (kBits == 4) {
      *reinterpret_cast<uint16_t*>(packed + at) = static_cast<uint16_t>(word);
    } else {
      packed[at] = static_cast<std::byte>(word);
    }
  }
};

template <typename Format, typename T>
using EncodeKernel = TeamKernel<EncodeWork<Format, T>>;

template <typename T>
struct DecodeEntry : GroupRun<T, const std::byte> {
  USBYTE_HD uint32_t pieces() const { return (this->count + kQuad - 1) / kQuad; }
};

/// values = what the messages of all ranks mean together, in their order.
template <typename Format, typename T>
struct DecodeKernel {
  static constexpr uint32_t kBits = Format::kBits;
  using Entry = DecodeEntry<T>;

  int32_t ranks;
  bool votes;      ///< of the sum only the sign counts
  int64_t stride;  ///< bytes from a rank's message to the next one's
  Table<Entry, kSmallTableBytes> table;

  int64_t threads_wanted() const { return table.pieces; }

  USBYTE_HD void operator()(GridIndex at) const {
    for (uint64_t p = at.global(); p < table.pieces; p += at.global_threads()) {
      const auto piece = static_cast<uint32_t>(p);
      const Entry& entry = table.entries[table.find(piece, 0, table.size - 1)];
      decode(entry, (piece - entry.first_piece) * kQuad);
    }
  }

 private:
  USBYTE_HD void decode(const Entry& entry, uint32_t begin) const {
    const uint32_t number = begin / Format::kElements * Format::kNumbers;
    float sum[kQuad] = {};
    for (int32_t r = 0; r < ranks; ++r) {
      const auto* const numbers =
          reinterpret_cast<const float*>(entry.numbers + r * stride) + number;
      const QuadBits<kBits> word = load(entry.packed + r * stride, begin, entry.count);
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        const auto code = static_cast<uint32_t>(word >> (i * kBits) & ((1U << kBits) - 1));
        const float x = Format::value(numbers, code);
        sum[i] = r == 0 ? x : sum[i] + x;
      }
    }
    T values[kQuad];
    USBYTE_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) {
      if (votes) sum[i] = sum[i] > 0 ? 1.0F : sum[i] < 0 ? -1.0F : sum[i];
      values[i] = Arithmetic<T>::store(sum[i]);
    }
    put(entry.values, static_cast<int32_t>(begin), entry.count, values);
  }

  USBYTE_HD static QuadBits<kBits> load(const std::byte* packed, uint32_t begin, uint32_t count) {
    if constexpr (kBits == 16) {
      Fetched<uint16_t, kQuad> fetched;
      fetched.fetch(reinterpret_cast<const uint16_t*>(packed), static_cast<int32_t>(begin), count);
      uint16_t codes[kQuad];
      fetched.get(codes);
      uint64_t word;
      memcpy(&word, codes, sizeof word);
      return word;
    }
    const std::byte* const at = packed + begin / 8 * kBits + begin % 8 * kBits / 8;
    if constexpr (kBits == 8) return *reinterpret_cast<const uint32_t*>(at);
    if constexpr (kBits == 4) return *reinterpret_cast<const uint16_t*>(at);
    const auto byte = static_cast<uint32_t>(*at);
    return kBits == 1 ? byte >> (begin % 8) : byte;
  }
};

}  // namespace usbyte::kernels
