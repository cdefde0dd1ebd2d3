// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "atomics.h"
#include "cuda/kernel_arguments.h"
#include "sparse/partitioners.h"

// Zen's hierarchical hashing (OSDI 2025): a batch of rows is grouped by server without
// a counter that all threads add to. Three kernels, one behind the other: claim, count, gather.
//
// A place holds a position in the batch, which no two rows share, so that equal ids have a place
// each. It is claimed by compare-and-swap: Zen's threads write where they have read that a place is
// empty, and read back who has won, and a row is lost if another thread writes between the two.
namespace usbyte::kernels {

/// A place that nobody has claimed.
constexpr int32_t kEmpty = -1;

/// Memory of a partition, as the kernels see it.
struct PartitionPlaces {
  int32_t* table;    // of each server: slots, then the serial region
  int32_t* tallies;  // see RowGroups
  int64_t servers, slots, serial;

  USBYTE_HD int64_t of_server() const { return slots + serial; }
  USBYTE_HD int32_t* unplaced() const { return tallies; }
  USBYTE_HD int32_t* counts() const { return tallies + 1; }
  USBYTE_HD int32_t* missed() const { return tallies + 1 + servers; }
  USBYTE_HD int32_t* written() const { return tallies + 1 + 2 * servers; }
};

/// Every row claims a place of its server's: one of `hashes` slots, or else the next one of the
/// serial region. `Memory` has the operations of Atomics.
template <typename Memory>
struct ClaimKernel {
  PartitionPlaces places;
  sparse::HashPartitioner servers;
  int64_t rows;
  uint64_t keys[kMostPartitionHashes];
  int32_t hashes;
  const int64_t* ids;
  const int64_t* count;  // null: `most`
  int64_t most;

  int64_t threads_wanted() const { return most > 0 ? most : 1; }  // which looks at the count

  USBYTE_HD void operator()(GridIndex at) const {
    int64_t end = most;
    if (count) {
      end = *count < 0 ? 0 : *count < most ? *count : most;
      if (end != *count && at.global() == 0) Memory::add(places.unplaced(), 1);
    }
    const auto step = static_cast<int64_t>(at.global_threads());
    for (auto i = static_cast<int64_t>(at.global()); i < end; i += step) {
      if (!claim(ids[i], static_cast<int32_t>(i))) Memory::add(places.unplaced(), 1);
    }
  }

 private:
  USBYTE_HD bool claim(int64_t id, int32_t position) const {
    if (id < 0 || id >= rows) return false;  // a server that there is not would be out of bounds
    const int server = servers.place(id).server;
    int32_t* const slots = places.table + server * places.of_server();
    for (int32_t h = 0; h < hashes; ++h) {
      const uint64_t drawn = mix(keys[h] ^ static_cast<uint64_t>(id)) >> 32;
      int32_t* const slot = slots + (drawn * static_cast<uint64_t>(places.slots) >> 32);
      if (Memory::compare_and_swap(slot, kEmpty, position) == kEmpty) return true;
    }
    const int32_t turn = Memory::add(places.missed() + server, 1);
    if (turn >= places.serial) return false;
    slots[places.slots + turn] = position;
    return true;
  }
};

/// Places of one server, dealt out to so many threads that each has about kEach. Neighbours read
/// neighbours, and each adds to what all share but once.
struct PartitionStrands {
  static constexpr int64_t kEach = 32;

  PartitionPlaces places;

  USBYTE_HD int64_t of_server() const { return (places.of_server() + kEach - 1) / kEach; }
  USBYTE_HD int64_t size() const { return places.servers * of_server(); }

  /// Calls `use(position)` for each claimed place of a strand.
  template <typename Use>
  USBYTE_HD void visit(int64_t strand, Use use) const {
    const int64_t server = strand / of_server();
    const int32_t* const table = places.table + server * places.of_server();
    for (int64_t p = strand % of_server(); p < places.of_server(); p += of_server()) {
      if (table[p] != kEmpty) use(table[p]);
    }
  }
  USBYTE_HD int32_t claimed(int64_t strand) const {
    int32_t out = 0;
    visit(strand, [&out](int32_t) { ++out; });
    return out;
  }
};

/// How many rows each server has.
struct CountKernel {
  PartitionStrands strands;

  int64_t threads_wanted() const { return strands.size(); }

  USBYTE_HD void operator()(GridIndex at) const {
    const auto step = static_cast<int64_t>(at.global_threads());
    for (auto s = static_cast<int64_t>(at.global()); s < strands.size(); s += step) {
      Atomics::add(strands.places.counts() + s / strands.of_server(), strands.claimed(s));
    }
  }
};

/// Lists what was claimed, server after server.
struct GatherKernel {
  PartitionStrands strands;
  const int64_t* ids;
  int64_t* ids_out;
  int32_t* positions_out;

  int64_t threads_wanted() const { return strands.size(); }

  USBYTE_HD void operator()(GridIndex at) const {
    const auto step = static_cast<int64_t>(at.global_threads());
    for (auto s = static_cast<int64_t>(at.global()); s < strands.size(); s += step) gather(s);
  }

 private:
  USBYTE_HD void gather(int64_t strand) const {
    const int64_t server = strand / strands.of_server();
    int64_t at = Atomics::add(strands.places.written() + server, strands.claimed(strand));
    for (int64_t s = 0; s < server; ++s) at += strands.places.counts()[s];
    const auto put = [&](int32_t position) {
      ids_out[at] = ids[position];
      positions_out[at++] = position;
    };
    strands.visit(strand, put);
  }
};

}  // namespace usbyte::kernels
