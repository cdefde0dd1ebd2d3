// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <type_traits>

#include "group_formats.h"
#include "table.h"
#include "team.h"

// Messages of codecs that work by groups; see codec/grouped.h for how they are laid out.
namespace usbyte::kernels {

constexpr uint32_t kQuad = 4;  ///< neighbouring elements that a lane reads at a time

/// A run of elements and its message. `first_piece` counts groups where it is encoded, threads that
/// it is given to where it is decoded.
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

/// Each team encodes a group; if it `Keeps`, with what is kept, of which it takes away what is
/// sent.
template <typename Format, typename T, bool Keeps>
struct EncodeWork {
  static constexpr uint32_t kElements = Format::kElements, kBits = Format::kBits;
  static constexpr uint32_t kNumbers = Format::kNumbers;
  /// A lane's rows of neighbours, so many that their bits are whole bytes.
  static constexpr uint32_t kNeighbours = kBits == 1 ? 2 * kQuad : kQuad;
  static constexpr uint32_t kRows = kElements / kLanes / kNeighbours;

  using Entry = EncodeEntry<Format, T>;
  using Partial = typename Format::Partial;
  struct Lane {
    uint32_t entry;
    bool plain;
    float x[kRows][kNeighbours];
  };

  /// Memory is a running mean, of which the gradient becomes this share, instead of what is unsent;
  /// 0 if not.
  float fresh, old;
  Table<Entry, kSmallTableBytes> table;

  USBYTE_HD int64_t pieces() const { return table.pieces; }

  USBYTE_HD Partial begin(uint32_t piece, uint32_t lane, Lane& state) const {
    state.entry = table.find(piece, 0, table.size - 1);
    const Entry& entry = table.entries[state.entry];
    const uint32_t group = (piece - entry.first_piece) * kElements;
    state.plain = plain(entry, group);
    return state.plain ? take_up<true>(entry, group, lane, state.x)
                       : take_up<false>(entry, group, lane, state.x);
  }

  USBYTE_HD void end(uint32_t piece, uint32_t lane, Lane& state, const Partial& whole) const {
    const Entry& entry = table.entries[state.entry];
    const uint32_t index = piece - entry.first_piece, group = index * kElements;
    const uint32_t rest = entry.count - group, count = rest < kElements ? rest : kElements;
    const Sender sender({whole, count, entry.key + group});
    if constexpr (kNumbers > 0) {
      auto* const numbers = reinterpret_cast<float*>(entry.numbers) + index * kNumbers;
      USBYTE_UNROLL
      for (uint32_t k = 0; k < kNumbers; ++k) {
        if (lane == 0) numbers[k] = sender.numbers[k];
      }
    }
    if (state.plain) {
      send<true>(entry, group, lane, kElements, sender, state.x);
    } else {
      send<false>(entry, group, lane, count, sender, state.x);
    }
  }

 private:
  using Sender = typename Format::Sender;

  /// Whether a group is whole, and its arrays aligned.
  USBYTE_HD static bool plain(const Entry& entry, uint32_t group) {
    const auto* const packed = reinterpret_cast<const uint16_t*>(entry.packed);
    return entry.count - group >= kElements && is_aligned<kNeighbours>(entry.values) &&
           is_aligned<kNeighbours>(entry.kept) && (kBits != 16 || is_aligned<kQuad>(packed));
  }

  /// Where in its group a lane's row begins.
  USBYTE_HD static uint32_t element(uint32_t row, uint32_t lane) {
    return (row * kLanes + lane) * kNeighbours;
  }

  template <uint32_t Rows, typename Act>
  USBYTE_HD static void each_element(Act act) {
    USBYTE_UNROLL
    for (uint32_t row = 0; row < Rows; ++row) {
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kNeighbours; ++i) act(row, i);
    }
  }

  template <bool Plain>
  USBYTE_HD Partial take_up(const Entry& entry, uint32_t group, uint32_t lane,
                            float (&x)[kRows][kNeighbours]) const {
    Partial part;
    USBYTE_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      T values[kNeighbours];
      read<Plain>(entry.values, group + element(row, lane), entry.count, values);
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kNeighbours; ++i) x[row][i] = Arithmetic<T>::load(values[i]);
    }
    if (Keeps && entry.kept) recall<Plain>(entry, group, lane, x);
    each_element<kRows>([&](uint32_t row, uint32_t i) { part.add(x[row][i]); });
    return part;
  }

  template <bool Plain>
  USBYTE_HD void recall(const Entry& entry, uint32_t group, uint32_t lane,
                        float (&x)[kRows][kNeighbours]) const {
    // More at a time would take too many registers.
    constexpr uint32_t kTogether = kRows * kNeighbours > 16 ? 16 / kNeighbours : kRows;
    USBYTE_UNROLL
    for (uint32_t begin = 0; begin < kRows; begin += kTogether) {
      float before[kTogether][kNeighbours];
      USBYTE_UNROLL
      for (uint32_t row = 0; row < kTogether; ++row) {
        const uint32_t at = group + element(begin + row, lane);
        read<Plain>(entry.kept, at, entry.count, before[row]);
      }
      if (fresh != 0) {
        each_element<kTogether>([&](uint32_t row, uint32_t i) {
          float& taken = x[begin + row][i];
          taken = multiply(old, before[row][i]) + multiply(fresh, taken);
        });
      } else {
        each_element<kTogether>(
            [&](uint32_t row, uint32_t i) { x[begin + row][i] += before[row][i]; });
      }
    }
  }

  template <bool Plain>
  USBYTE_HD void send(const Entry& entry, uint32_t group, uint32_t lane, uint32_t count,
                      const Sender& sender, float (&x)[kRows][kNeighbours]) const {
    std::byte* const packed = entry.packed + group / 8 * kBits;
    Word<kBits> words[kRows];
    USBYTE_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t at = element(row, lane);
      words[row] = sender.codes(x[row], at);
      if constexpr (!Plain) words[row] &= first_codes(at < count ? count - at : 0);
      store<Plain>(packed, at, count, words[row]);
    }
    if (!Keeps || !entry.kept) return;
    forget(words, sender, x);
    USBYTE_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      write<Plain>(entry.kept, group + element(row, lane), entry.count, x[row]);
    }
  }

  /// See codec/message.h, `forget`.
  USBYTE_HD void forget(const Word<kBits> (&words)[kRows], const Sender& sender,
                        float (&x)[kRows][kNeighbours]) const {
    const typename Format::Receiver receiver(sender.numbers);
    bool finite = is_finite(sender.numbers[0]);
    if constexpr (kNumbers == 2) finite = finite && is_finite(sender.numbers[1]);
    if (fresh == 0 && finite) {
      each_element<kRows>([&](uint32_t row, uint32_t i) {
        x[row][i] -= receiver.value(code_of<kBits>(words[row], i));
      });
      return;
    }
    each_element<kRows>([&](uint32_t row, uint32_t i) {
      const float sent = receiver.value(code_of<kBits>(words[row], i));
      if (fresh == 0 && is_finite(sent)) {
        x[row][i] -= sent;
      } else if (!is_finite(x[row][i])) {
        x[row][i] = 0;
      }
    });
  }

  USBYTE_HD static Word<kBits> first_codes(uint32_t n) {
    return n < kNeighbours ? (Word<kBits>{1} << (n * kBits)) - 1 : ~Word<kBits>{0};
  }

  /// A row's bits, where its group's begin; those are filled up with zeros to 4 bytes.
  template <bool Plain>
  USBYTE_HD static void store(std::byte* packed, uint32_t at, uint32_t count, Word<kBits> word) {
    if constexpr (kBits == 16) {
      uint16_t codes[kQuad];
      memcpy(codes, &word, sizeof codes);
      write<Plain>(reinterpret_cast<uint16_t*>(packed), at, count, codes);
    } else {
      constexpr uint32_t kBytes = kNeighbours * kBits / 8;
      using Bytes = std::conditional_t<kBytes == 4, uint32_t,
                                       std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
      const uint32_t byte = at / kNeighbours * kBytes;
      if (!Plain && byte >= (count * kBits + 31) / 32 * 4) return;
      *reinterpret_cast<Bytes*>(packed + byte) = static_cast<Bytes>(word);
    }
  }
};

template <typename Format, typename T, bool Keeps>
using EncodeKernel = TeamKernel<EncodeWork<Format, T, Keeps>>;

/// As many threads as are a team decode a tile, each of them a quad of every row.
template <typename T>
struct DecodeEntry : GroupRun<T, const std::byte> {
  static constexpr uint32_t kRows = 4, kRowElements = kLanes * kQuad;
  static constexpr uint32_t kTile = kRows * kRowElements;

  USBYTE_HD uint32_t pieces() const { return (this->count + kTile - 1) / kTile * kLanes; }
};

/// values = what the messages of all ranks mean together, in their order.
template <typename Format, typename T>
struct DecodeKernel {
  static constexpr uint32_t kElements = Format::kElements, kBits = Format::kBits;
  static constexpr uint32_t kNumbers = Format::kNumbers;
  /// Of the sum only the sign counts.
  static constexpr bool kVotes = std::is_same_v<Format, MajorityFormat>;
  using Entry = DecodeEntry<T>;

  int32_t ranks;
  int64_t stride;  ///< bytes from a rank's message to the next one's
  Table<Entry, kSmallTableBytes> table;

  int64_t threads_wanted() const { return table.pieces; }

  USBYTE_HD void operator()(GridIndex at) const {
    for (uint64_t p = at.global(); p < table.pieces; p += at.global_threads()) {
      const auto piece = static_cast<uint32_t>(p);
      const Entry& entry = table.entries[table.find(piece, 0, table.size - 1)];
      const uint32_t index = piece - entry.first_piece;
      const uint32_t tile = index / kLanes * Entry::kTile, lane = index % kLanes;
      if (plain(entry, tile)) {
        decode<true>(entry, tile, lane);
      } else {
        decode<false>(entry, tile, lane);
      }
    }
  }

 private:
  static constexpr uint32_t kRows = Entry::kRows, kTile = Entry::kTile;
  static constexpr uint32_t kRowElements = Entry::kRowElements;
  static constexpr uint32_t kGroups = kElements < kTile ? kTile / kElements : 1;

  /// What a thread reads of a rank's message.
  struct Share {
    Word<kBits> words[kRows];
    float numbers[kGroups][kNumbers + 1];
  };

  /// Whether a tile is whole, and its arrays aligned.
  USBYTE_HD bool plain(const Entry& entry, uint32_t tile) const {
    const auto* const packed = reinterpret_cast<const uint16_t*>(entry.packed);
    return entry.count - tile >= kTile && is_aligned<kQuad>(entry.values) &&
           (kBits != 16 || (is_aligned<kQuad>(packed) && stride % kAtOnce<uint16_t, kQuad> == 0));
  }

  template <bool Plain>
  USBYTE_HD void decode(const Entry& entry, uint32_t tile, uint32_t lane) const {
    const uint32_t first = tile + lane * kQuad;
    const uint32_t rest = first < entry.count ? entry.count - first : 0;
    float sums[kRows][kQuad];
    USBYTE_UNROLL
    for (auto& row : sums) {
      USBYTE_UNROLL
      for (float& sum : row) sum = -0.0F;  // which changes nothing that is added to it
    }
    int32_t rank = 0;
    // Two ranks' loads are in flight together.
    for (; Plain && rank + 1 < ranks; rank += 2) {
      const Share one = share<Plain>(entry, tile, first, rest, rank);
      const Share other = share<Plain>(entry, tile, first, rest, rank + 1);
      add(one, sums);
      add(other, sums);
    }
    for (; rank < ranks; ++rank) add(share<Plain>(entry, tile, first, rest, rank), sums);
    USBYTE_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      T values[kQuad];
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        float sum = sums[row][i];
        if constexpr (kVotes) sum = sum > 0 ? 1.0F : sum < 0 ? -1.0F : sum;
        values[i] = Arithmetic<T>::store(sum);
      }
      write<Plain>(entry.values + first, row * kRowElements, rest, values);
    }
  }

  USBYTE_HD static void add(const Share& share, float (&sums)[kRows][kQuad]) {
    USBYTE_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const typename Format::Receiver receiver(share.numbers[row * kGroups / kRows]);
      USBYTE_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        sums[row][i] += receiver.value(code_of<kBits>(share.words[row], i));
      }
    }
  }

  /// What the thread that begins with element `first` of a tile reads of a rank's message. The run
  /// has `rest` elements from there.
  template <bool Plain>
  USBYTE_HD Share share(const Entry& entry, uint32_t tile, uint32_t first, uint32_t rest,
                        int32_t rank) const {
    const std::byte* const packed =
        entry.packed + rank * stride + first / 8 * kBits + first % 8 * kBits / 8;
    Share out;
    USBYTE_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      out.words[row] = read_codes<Plain>(packed, row, rest) >> (kBits == 1 ? first % 8 : 0);
    }
    if constexpr (kNumbers > 0) {
      const uint32_t group = tile / kElements, groups = (entry.count - 1) / kElements + 1 - group;
      const auto* const numbers =
          reinterpret_cast<const float*>(entry.numbers + rank * stride) + group * kNumbers;
      USBYTE_UNROLL
      for (uint32_t g = 0; g < kGroups; ++g) {
        USBYTE_UNROLL
        for (uint32_t k = 0; k < kNumbers; ++k) {
          out.numbers[g][k] = Plain || g < groups ? numbers[g * kNumbers + k] : 0;
        }
      }
    }
    return out;
  }

  template <bool Plain>
  USBYTE_HD static Word<kBits> read_codes(const std::byte* packed, uint32_t row, uint32_t rest) {
    const uint32_t begin = row * kRowElements;
    if constexpr (kBits == 16) {
      uint16_t codes[kQuad];
      read<Plain>(reinterpret_cast<const uint16_t*>(packed), begin, rest, codes);
      uint64_t word;
      memcpy(&word, codes, sizeof word);
      return word;
    } else {
      if (!Plain && begin >= rest) return 0;
      const std::byte* const at = packed + begin / 8 * kBits;
      if constexpr (kBits == 8) return *reinterpret_cast<const uint32_t*>(at);
      if constexpr (kBits == 4) return *reinterpret_cast<const uint16_t*>(at);
      return static_cast<uint32_t>(*at);
    }
  }
};

}  // namespace usbyte::kernels
