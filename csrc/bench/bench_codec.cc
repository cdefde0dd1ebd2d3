// What codecs cost: encoding and decoding on one core, against copies of the same gradients.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "bench.h"
#include "usbyte/codec.h"
#include "usbyte/timeline.h"

namespace {

using namespace usbyte;
using bench::fixed;
using bench::percentile;

constexpr const char* kAbout =
    "Encodes and decodes made-up gradients on one core.\n\n"
    "  size      bytes of the gradients, float32\n"
    "  message   bytes of the message over those of the gradients, in per cent\n"
    "  encode, decode, add\n"
    "            GB/s of gradients: their size / time; median. add: decode_add to gradients\n"
    "  copy      GB/s of memcpy of gradients of that size, measured in turns; median\n"
    "  read      GB/s of one pass that reads them (their largest magnitude); likewise\n\n"
    "1 GB = 10^9 bytes.";

struct Rates {
  double encode, decode, add, copy, read;  // bytes of gradients in a second
};

// Normal, as gradients about are.
std::vector<float> gradients(int64_t count) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(rng);
  return out;
}

uint32_t largest(const std::vector<float>& values) {
  uint32_t out = 0;
  for (float x : values) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    out = std::max(out, bits & 0x7fffffff);
  }
  return out;
}

Rates measure(const Codec& codec, int64_t count, int64_t iters) {
  const std::vector<float> values = gradients(count);
  std::vector<float> decoded(values.size()), copied(values.size());
  std::vector<std::byte> message(static_cast<size_t>(codec.message_bytes(count)));
  const Draw draw = Draw::of(1, 1, 0, 0);
  volatile uint32_t seen = 0;
  const std::function<void()> actions[] = {
      [&] { codec.encode(values, draw, message.data()); },
      [&] { codec.decode(message.data(), draw, decoded); },
      [&] { codec.decode_add(message.data(), draw, 1, decoded); },
      [&] { std::memcpy(copied.data(), values.data(), values.size() * sizeof(float)); },
      [&] { seen = largest(values); }};
  std::vector<double> times[std::size(actions)];
  for (int64_t i = -1; i < iters; ++i) {
    for (size_t a = 0; a < std::size(actions); ++a) {
      const double start = now_s();
      actions[a]();
      if (i >= 0) times[a].push_back(now_s() - start);
    }
  }
  const auto rate = [&](size_t a) {
    return static_cast<double>(count) * sizeof(float) / percentile(times[a], 0.5);
  };
  return {rate(0), rate(1), rate(2), rate(3), rate(4)};
}

int bench_codec(const bench::Options& options) {
  std::vector<std::string> specs = {"fp16",      "bf16",       "fp8",       "fp8:e5m2", "int8",
                                    "topk:0.01", "randk:0.01", "qsgd:2",    "qsgd:4",   "qsgd:8",
                                    "terngrad",  "signsgd",    "efsignsgd", "onebit"};
  if (options.text("codec") != "all") specs = {options.text("codec")};
  const int64_t low = options.integer("min-bytes", 4), high = options.integer("max-bytes", low);
  const int64_t factor = options.integer("factor", 2);
  std::vector<std::vector<std::string>> table = {{"codec", "size(B)", "message(%)", "encode(GB/s)",
                                                  "decode(GB/s)", "add(GB/s)", "copy(GB/s)",
                                                  "read(GB/s)", "encode/copy(%)"}};
  auto rows = nlohmann::ordered_json::array();
  for (const std::string& spec : specs) {
    const auto codec = make_codec(spec);
    for (int64_t bytes = low; bytes <= high; bytes *= factor) {
      const int64_t count = bytes / 4;
      const Rates r = measure(*codec, count, options.integer("iters", 1));
      const double share =
          static_cast<double>(codec->message_bytes(count)) / static_cast<double>(4 * count);
      const auto gb = [](double rate) { return fixed(rate * 1e-9, 2); };
      table.push_back({spec, std::to_string(4 * count), fixed(100 * share, 2), gb(r.encode),
                       gb(r.decode), gb(r.add), gb(r.copy), gb(r.read),
                       fixed(100 * r.encode / r.copy, 0)});
      rows.push_back({{"codec", spec},
                      {"size_bytes", 4 * count},
                      {"message_share", share},
                      {"encode_bytes_per_s", r.encode},
                      {"decode_bytes_per_s", r.decode},
                      {"add_bytes_per_s", r.add},
                      {"copy_bytes_per_s", r.copy},
                      {"read_bytes_per_s", r.read}});
    }
  }
  bench::print_table(options.table(), table);
  options.write({{"benchmark", "codec"}, {"rows", std::move(rows)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options(kAbout);
  options.flag("codec", "all", "as in topk:0.01; all: every one")
      .flag("min-bytes", "64K", "smallest gradients; K, M and G are 2^10, 2^20 and 2^30")
      .flag("max-bytes", "64M", "largest gradients")
      .flag("factor", "32", "each size is this many times the one before")
      .flag("iters", "15", "timed calls for each size");
  return bench::run(std::move(options), argc, argv, bench_codec);
}
