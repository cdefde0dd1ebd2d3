// SPDX-License-Identifier: Apache-2.0
#include "usbyte/codec_costs.h"

#include <cmath>

#include "plan/json.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFormat = "usbyte-codec-costs-1";

// The one spelling that plans have of a spec.
std::string canonical(const std::string& spec) {
  const auto codec = make_codec(spec);
  if (!codec) throw UsageError("codec costs: \"none\" is free and has no entry; remove it");
  return codec->spec();
}

ordered_json row(const AlphaBeta& cost) {
  return {{"alpha_s", cost.alpha_s},
          {"beta_s_per_byte", cost.beta_s_per_byte},
          {"overlap_s", cost.overlap_s}};
}

AlphaBeta cost_of(const ordered_json& row, const std::string& what) {
  const AlphaBeta cost{row.at("alpha_s").get<double>(), row.at("beta_s_per_byte").get<double>(),
                       row.at("overlap_s").get<double>()};
  cost.validate("codec costs: " + what);
  return cost;
}

}  // namespace

CodecCost CodecCosts::of(std::string_view spec) const {
  const auto codec = make_codec(spec);
  if (!codec) return {};
  auto it = by_spec.find(codec->spec());
  if (it != by_spec.end()) return it->second;
  std::string known;
  for (const auto& [key, unused] : by_spec) known += (known.empty() ? "" : ",") + key;
  throw UsageError("codec costs: what " + codec->spec() + " costs is not known, only of " +
                   (known.empty() ? "nothing" : known) + "; run usbyte probe --codecs " +
                   codec->spec() + (known.empty() ? "" : "," + known));
}

std::string CodecCosts::to_json() const {
  ordered_json codecs = ordered_json::object();
  for (const auto& [spec, cost] : by_spec) {
    codecs[spec] = {{"encode", row(cost.encode)}, {"decode", row(cost.decode)}};
    if (cost.at_once) {
      codecs[spec]["at_once"] = true;
      codecs[spec]["further_s_per_byte"] = cost.further_s_per_byte;
    }
  }
  ordered_json out{{"format", kFormat}, {"codecs", std::move(codecs)}};
  if (row_s != 0) out["row_s"] = row_s;
  return out.dump();
}

CodecCosts CodecCosts::from_json(std::string_view json) {
  try {
    const ordered_json root = parse_json(json, "codec costs");
    if (!root.is_object() || root.value("format", "") != kFormat) {
      throw UsageError("codec costs: unknown format; usbyte probe --codecs --json writes them");
    }
    CodecCosts costs{{}, root.value("row_s", 0.0)};
    if (!(costs.row_s >= 0 && std::isfinite(costs.row_s))) {
      throw UsageError("codec costs: row_s: a cost is negative or no number");
    }
    const ordered_json& codecs = root.at("codecs");
    if (!codecs.is_object()) throw UsageError("codec costs: \"codecs\" is no object");
    for (const auto& [spec, entry] : codecs.items()) {
      const CodecCost cost{cost_of(entry.at("encode"), spec + ", encode"),
                           cost_of(entry.at("decode"), spec + ", decode"),
                           entry.value("at_once", false), entry.value("further_s_per_byte", 0.0)};
      if (!(cost.further_s_per_byte >= 0 && std::isfinite(cost.further_s_per_byte))) {
        throw UsageError("codec costs: " + spec +
                         ", further_s_per_byte: a cost is negative or no " + "number");
      }
      if (!costs.by_spec.emplace(canonical(spec), cost).second) {
        throw UsageError("codec costs: " + canonical(spec) + " has two entries; remove one");
      }
    }
    return costs;
  } catch (const ordered_json::exception& e) {
    throw UsageError(std::string("codec costs: malformed JSON: ") + e.what() +
                     "; usbyte probe --codecs --json writes them");
  }
}

}  // namespace usbyte
