#include "usbyte/sparse.h"

#include <algorithm>
#include <array>
#include <string>

#include "rows.h"
#include "schemes.h"
#include "usbyte/error.h"

namespace usbyte {

SparseRows coalesce(const SparseShape& shape, RowsView rows) {
  const sparse::RowsMessage given{sparse::Keys(rows.ids), rows.values, {}};
  return sparse::rows_of(sparse::add_up(shape, shape.rows, std::span(&given, 1)));
}

std::span<const SparseScheme> sparse_schemes() {
  static const std::array kSchemes = {sparse::kZen,      sparse::kHierarchical, sparse::kAgSparse,
                                      sparse::kSparCml,  sparse::kOmniReduce,   sparse::kSparsePs,
                                      sparse::kDenseRing};
  return kSchemes;
}

const SparseScheme& sparse_scheme(std::string_view name) {
  const std::span<const SparseScheme> all = sparse_schemes();
  const auto found = std::ranges::find(all, name, &SparseScheme::name);
  if (found != all.end()) return *found;
  std::string known;
  for (const SparseScheme& s : all) known += (known.empty() ? "" : ", ") + std::string(s.name);
  throw UsageError("unknown sparse scheme '" + std::string(name) + "'; known are " + known);
}

}  // namespace usbyte
