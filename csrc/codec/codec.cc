#include "usbyte/codec.h"

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "make.h"
#include "random.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using Make = codecs::Made (*)(const std::string& parameter);

constexpr std::array<std::pair<std::string_view, Make>, 11> kCodecs = {{
    {"fp16", codecs::fp16},
    {"bf16", codecs::bf16},
    {"fp8", codecs::fp8},
    {"int8", codecs::int8},
    {"topk", codecs::topk},
    {"randk", codecs::randk},
    {"qsgd", codecs::qsgd},
    {"terngrad", codecs::terngrad},
    {"signsgd", codecs::signsgd},
    {"efsignsgd", codecs::efsignsgd},
    {"onebit", codecs::onebit},
}};

}  // namespace

Draw Draw::of(uint64_t seed, int64_t step, int64_t begin, int rank) {
  const uint64_t shared =
      mix(mix(seed ^ static_cast<uint64_t>(step)) + static_cast<uint64_t>(begin));
  return {shared, mix(shared + static_cast<uint64_t>(rank) + 1)};
}

void Codec::combine(std::span<const std::byte* const> messages, const Draw& draw,
                    std::span<float> values) const {
  decode(messages.front(), draw, values);
  for (const std::byte* message : messages.subspan(1)) decode_add(message, draw, 1, values);
}

std::shared_ptr<const Codec> make_codec(std::string_view spec) {
  if (spec == "none") return nullptr;
  const size_t colon = spec.find(':');
  const std::string_view name = spec.substr(0, colon);
  for (const auto& [known, make] : kCodecs) {
    if (known != name) continue;
    if (colon == spec.size() - 1) break;  // "topk:"
    return make(colon == spec.npos ? "" : std::string(spec.substr(colon + 1)));
  }
  std::string names = "none";
  for (const auto& [known, make] : kCodecs) names += ", " + std::string(known);
  throw UsageError("codec '" + std::string(spec) + "' is unknown; there are " + names +
                   ", some with a parameter as in topk:0.01");
}

std::vector<std::string> codec_names() {
  std::vector<std::string> out;
  for (const auto& [name, make] : kCodecs) out.emplace_back(name);
  return out;
}

void codecs::check_none(const std::string& codec, const std::string& parameter) {
  if (parameter.empty()) return;
  throw UsageError("codec '" + codec + ":" + parameter + "': " + codec + " takes no parameter");
}

double codecs::ratio_of(const std::string& codec, const std::string& parameter) {
  double value = 0;
  const char* const end = parameter.data() + parameter.size();
  const auto [rest, error] = std::from_chars(parameter.data(), end, value);
  if (error != std::errc() || rest != end || !(value > 0 && value <= 1)) {
    throw UsageError("codec '" + codec + (parameter.empty() ? "" : ":" + parameter) +
                     "': needs the share of elements to send, above 0 and at most 1, as in " +
                     codec + ":0.01");
  }
  return value;
}

std::string codecs::text_of(double value) {
  std::array<char, 32> text{};
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), end);
}

}  // namespace usbyte
