// SPDX-License-Identifier: Apache-2.0
#include "usbyte/codec.h"

#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "make.h"
#include "message.h"
#include "random.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using Make = codecs::Made (*)(const std::string& parameter);

constexpr std::array<std::pair<std::string_view, Make>, 15> kCodecs = {{
    {"fp16", codecs::fp16},
    {"bf16", codecs::bf16},
    {"fp8", codecs::fp8},
    {"int8", codecs::int8},
    {"topk", codecs::topk},
    {"randk", codecs::randk},
    {"dct", codecs::dct},
    {"dgc", codecs::dgc},
    {"qsgd", codecs::qsgd},
    {"terngrad", codecs::terngrad},
    {"signsgd", codecs::signsgd},
    {"signum", codecs::signum},
    {"efsignsgd", codecs::efsignsgd},
    {"onebit", codecs::onebit},
    {"powersgd", codecs::powersgd},
}};

template <typename T>
std::optional<T> read(const std::string& text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

constexpr std::string_view kWithoutFeedback = ",feedback=off";

// A codec that forgets what it does not send.
class WithoutFeedback final : public Codec {
 public:
  explicit WithoutFeedback(codecs::Made inner) : inner_(std::move(inner)) {}

  std::string spec() const override { return inner_->spec() + std::string(kWithoutFeedback); }
  bool adds() const override { return inner_->adds(); }
  DType message_dtype() const override { return inner_->message_dtype(); }
  int64_t message_bytes(int64_t count) const override { return inner_->message_bytes(count); }
  int state_rows() const override { return 0; }
  std::optional<GroupCodec> kernels() const override { return inner_->kernels(); }
  const Selection* selection() const override { return inner_->selection(); }
  void encode(std::span<const float> values, const RngKey& rng, std::byte* message) const override {
    inner_->encode(values, rng, message);
  }
  void decode(const std::byte* message, const RngKey& rng, std::span<float> values) const override {
    inner_->decode(message, rng, values);
  }
  void decode_add(const std::byte* message, const RngKey& rng, float factor,
                  std::span<float> values) const override {
    inner_->decode_add(message, rng, factor, values);
  }

 private:
  const codecs::Made inner_;
};

codecs::Made without_feedback(codecs::Made inner) {
  // dct's threshold is that of what is remembered.
  if (inner->remembers() != "unsent" || inner->spec().starts_with("dct")) {
    throw UsageError("codec '" + inner->spec() + "' has no feedback that could be off");
  }
  return std::make_shared<WithoutFeedback>(std::move(inner));
}

codecs::Made make(std::string_view spec) {
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

}  // namespace

RngKey RngKey::of(uint64_t seed, int64_t step, int64_t begin, int rank) {
  const uint64_t shared =
      mix(mix(mix(seed) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(begin));
  return {shared, mix(shared + static_cast<uint64_t>(rank) + 1)};
}

std::string Codec::remembers() const { return state_rows() == 0 ? "" : "unsent"; }

void Codec::combine(std::span<const std::byte* const> messages, const RngKey& rng,
                    std::span<float> values) const {
  decode(messages.front(), rng, values);
  for (const std::byte* message : messages.subspan(1)) decode_add(message, rng, 1, values);
}

void Codec::send(std::span<const float> gradient, CodecState& state, const RngKey& rng, int,
                 std::byte* message) const {
  if (state_rows() == 0) return encode(gradient, rng, message);
  const std::span<float> kept(state.rows[0], gradient.size());
  loops().add(gradient.data(), 1, kept.data(), std::ssize(kept));
  encode(kept, rng, message);
  if (loops().largest(kept.data(), std::ssize(kept)) < codecs::kInfinityBits) {
    return decode_add(message, rng, -1, kept);
  }
  std::vector<float> sent(kept.size());
  decode(message, rng, sent);
  codecs::forget(sent, kept);
  if (!codecs::all_finite(sent)) codecs::forget_what_is_not_finite(kept);
}

std::shared_ptr<const Codec> make_codec(std::string_view spec) {
  if (spec == "none") return nullptr;
  static std::mutex mutex;  // guards the map
  static std::map<std::string, codecs::Made, std::less<>> made;
  std::lock_guard lock(mutex);
  const auto known = made.find(spec);
  if (known != made.end()) return known->second;
  std::string_view inner = spec;
  const bool forgets = inner.ends_with(kWithoutFeedback);
  if (forgets) inner.remove_suffix(kWithoutFeedback.size());
  codecs::Made codec = make(inner);
  if (forgets) codec = without_feedback(std::move(codec));
  return made[std::string(spec)] = codec;
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
  const std::optional<double> value = read<double>(parameter);
  if (!value || !(*value > 0 && *value <= 1)) {
    throw UsageError("codec '" + codec + (parameter.empty() ? "" : ":" + parameter) +
                     "': needs the share of elements to send, above 0 and at most 1, as in " +
                     codec + ":0.01");
  }
  return *value;
}

codecs::Parameters::Parameters(std::string codec, const std::string& text)
    : codec_(std::move(codec)) {
  size_t begin = 0;
  for (bool is_first = true; begin <= text.size(); is_first = false) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    if (is_first && equals == part.npos) {
      first_ = part;
    } else if (equals == part.npos ||
               !named_.emplace(part.substr(0, equals), part.substr(equals + 1)).second) {
      throw UsageError("codec '" + codec_ + ":" + text + "': cannot read '" + part +
                       "'; parameters are written as in dgc:0.001,momentum=0.9");
    }
    begin = end + 1;
  }
}

template <typename T>
T codecs::Parameters::take(const std::string& name, T otherwise, T least, T most) {
  const auto it = named_.find(name);
  if (it == named_.end()) return otherwise;
  const std::optional<T> value = read<T>(it->second);
  if (!value || !(*value >= least && *value <= most)) {
    throw UsageError("codec '" + codec_ + "': " + name + "=" + it->second +
                     " is not a number from " + text_of(static_cast<double>(least)) + " to " +
                     text_of(static_cast<double>(most)));
  }
  named_.erase(it);
  return *value;
}

double codecs::Parameters::number(const std::string& name, double otherwise, double least,
                                  double most) {
  return take<double>(name, otherwise, least, most);
}

int64_t codecs::Parameters::whole(const std::string& name, int64_t otherwise, int64_t least,
                                  int64_t most) {
  return take<int64_t>(name, otherwise, least, most);
}

void codecs::Parameters::check_all_read() const {
  if (named_.empty()) return;
  throw UsageError("codec '" + codec_ + "' has no parameter '" + named_.begin()->first + "'");
}

std::string codecs::text_of(double value) {
  std::array<char, 32> text{};
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), end);
}

}  // namespace usbyte
