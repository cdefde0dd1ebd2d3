// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/random.h"

// Which rank adds up which rows of a matrix, and by which key it knows each: numbers below its
// `range`, all of which are rows. No rank needs a table.
namespace usbyte::sparse {

struct Place {
  int server;
  int64_t key;
};

/// Each rank has one of as many equal ranges.
class RangePartitioner {
 public:
  RangePartitioner(int64_t rows, int ranks) : rows_(rows), run_((rows + ranks - 1) / ranks) {}

  Place place(int64_t id) const {
    const int64_t server = id / run_;
    return {static_cast<int>(server), id - server * run_};
  }
  int64_t id(int server, int64_t key) const { return begin(server) + key; }
  int64_t begin(int server) const { return std::min(server * run_, rows_); }
  int64_t range(int server) const { return begin(server + 1) - begin(server); }

 private:
  int64_t rows_, run_;
};

/// Rows are dealt out: of as many rows in a row as there are ranks each rank has one, and a hash of
/// the round says whose the first is. A rank is as likely to have one row as another, and has the
/// same number of them; keys are in the order of ids, so that whoever goes through the rows of a
/// message goes through memory.
class HashPartitioner {
 public:
  HashPartitioner(int64_t rows, int ranks, uint64_t seed)
      : rows_(rows), ranks_(ranks), seed_(mix(seed)), rounds_((rows + ranks - 1) / ranks) {}

  USBYTE_HD Place place(int64_t id) const {
    const int64_t round = id / ranks_;
    const int64_t server = id - round * ranks_ + first(round);
    return {static_cast<int>(server < ranks_ ? server : server - ranks_), round};
  }
  USBYTE_HD int64_t id(int server, int64_t key) const {
    const int64_t place = server - first(key);
    return key * ranks_ + (place < 0 ? place + ranks_ : place);
  }
  int64_t range(int server) const {
    return rounds_ > 0 && id(server, rounds_ - 1) >= rows_ ? rounds_ - 1 : rounds_;
  }

 private:
  /// Whose the first row of a round is.
  USBYTE_HD int64_t first(int64_t round) const {
    const uint64_t drawn = mix(seed_ ^ static_cast<uint64_t>(round)) >> 32;
    return static_cast<int64_t>(drawn * static_cast<uint64_t>(ranks_) >> 32);
  }

  int64_t rows_, ranks_;
  uint64_t seed_;
  int64_t rounds_;
};

}  // namespace usbyte::sparse
