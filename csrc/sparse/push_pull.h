#pragma once

#include "rows.h"

namespace usbyte::sparse {

/// Which rank adds up which rows: the numbers of all rows, in some order, cut into equal runs.
class Servers {
 public:
  Servers(int64_t rows, int ranks) : rows_(rows), run_((rows + ranks - 1) / ranks) {}

  int of(uint64_t number) const { return static_cast<int>(number / static_cast<uint64_t>(run_)); }
  int64_t begin(int server) const { return std::min(server * run_, rows_); }
  /// How many rows a server has.
  int64_t range(int server) const { return begin(server + 1) - begin(server); }

 private:
  int64_t rows_, run_;
};

struct PushPull {
  /// Rows are numbered by a permutation that the seed chooses, and not as they come.
  bool hashes = false;
  /// What is pulled may have a bitmap instead of keys.
  bool bitmaps = false;
};

/// Lengths and messages, to the servers and from them.
inline int push_pull_transfers(int) { return 4; }

/// Sums by push and pull: each row goes to its server, where equal ones meet, and each server sends
/// its sums to all.
SparseSum push_pull(Exchange& exchange, const SparseShape& shape, SparseRows mine,
                    const SparseOptions& options, PushPull how);

}  // namespace usbyte::sparse
