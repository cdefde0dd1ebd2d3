// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <random>

#include "draft.h"
#include "usbyte/simulator.h"

namespace usbyte {

/// Improves drafts on the simulator by iterated local search until the budget is spent. Lourenco,
/// Martin and Stuetzle, "Iterated Local Search", 2003. Deterministic.
class LocalSearch {
 public:
  /// `layout` holds the tensors of the simulated job; `work` is the budget of each `improve` and
  /// each `simplify`, in tensors and ops simulated, and more for large jobs. No random changes are
  /// tried once the lateness is `enough_s`. `may_mix`: ops may change between all_reduces and
  /// split ones.
  LocalSearch(Simulator& simulator, const Plan& layout, const DraftCosts& costs, int64_t work,
              double enough_s, bool may_mix)
      : simulator_(&simulator),
        layout_(&layout),
        costs_(costs),
        work_(work),
        enough_s_(enough_s),
        may_mix_(may_mix) {}

  /// Hill climbing, and again after a few random changes to the best that was found. It goes over
  /// these changes: join two ops that are neighbours in launch order; move an op elsewhere in the
  /// order; cut an op in two, also so that the first goes in one shot; shift the edge between two
  /// blocks of different ops in the flat buffer; make an all_reduce a split op, or the other way.
  /// Returns the predicted lateness, s.
  double improve(Draft& draft);
  /// Goes once over the ops in launch order, as far as the budget lasts, and joins neighbours where
  /// the predicted lateness does not grow by more than `worse_s` in all: fewer ops, of which the
  /// model may know too little. What goes in one shot stays apart from what does not.
  void simplify(Draft& draft, double worse_s);

 private:
  struct Score {
    double lateness_s, end_s;
    // One that is equal but done earlier leaves room for the next change.
    bool better_than(const Score& other, double slack_s) const;
  };

  void start(const Draft& draft);
  Score score(const Draft& draft);
  void hill_climb(Draft& draft);
  void perturb(Draft& draft, std::mt19937& random) const;
  bool one_shot(const Draft& draft, size_t op) const;
  int64_t head(const Draft& draft, size_t op) const;
  bool join_next(Draft& draft, size_t op) const;
  bool accept(Draft& draft, Draft changed);
  bool join(Draft& draft);
  bool move(Draft& draft);
  bool cut(Draft& draft);
  bool shift(Draft& draft);
  bool change_kind(Draft& draft);

  Simulator* simulator_;
  const Plan* layout_;
  DraftCosts costs_;
  int64_t work_;
  double enough_s_;
  bool may_mix_;
  double slack_s_ = 0;
  int64_t left_ = 0;
  Score best_{};
};

}  // namespace usbyte
